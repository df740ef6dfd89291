"""OLMo 3 (model card of allenai/Olmo-3-7B-Instruct); its block is OLMo 2's (arXiv:2501.00656)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.full_norm_attention import full_norm
from labinfer.models.rope_parameters import read_rope, require_ropes_by_type
from labinfer.weights.checkpoint_names import CheckpointNames


class Olmo3ForCausalLM(Decoder):
    """Post-norm layers with QK norm over all heads; 3 of 4 layers have a sliding window."""

    norm_placement = "post"
    names = CheckpointNames(
        renamed={
            "self_attn_output_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        }
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(rms_norm_eps=1e-5, rope_theta=5e5, sliding_window=4096)
        eps, mlp = file.get("rms_norm_eps", float), read_gated_mlp(file)
        window = file.size("sliding_window") if file.values.get("sliding_window") is not None else 0
        windows = read_windows(file, window, lambda n: FULL if (n + 1) % 4 == 0 else SLIDING)
        # Top-level ``rope_scaling`` and ``rope_theta`` apply to layers with full attention only, as in Transformers.
        require_ropes_by_type(file)
        local = file.without("rope_scaling", "rope_theta").with_defaults(rope_theta=5e5)
        ropes = {True: read_rope(local, SLIDING), False: read_rope(file, FULL)}
        layers = [
            LayerConfig(mixer=full_norm(read_attention(file, rope=ropes[w > 0], window=w, qk_norm_eps=eps)), mlp=mlp)
            for w in windows
        ]
        return read_model(file, layers)
