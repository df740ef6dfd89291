"""EXAONE 4.0 (LG AI Research 2025, arXiv:2507.11407)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class Exaone4ForCausalLM(Decoder):
    """Post-norm layers with QK norm; in models with sliding windows the layers with full attention have no rotary embedding."""

    norm_placement = "post"
    names = CheckpointNames(
        renamed={
            "self_attn_output_norm": "post_attention_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        }
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
        window = file.size("sliding_window") if file.values.get("sliding_window") is not None else 0
        every = 1
        if window and file.values.get("layer_types") is None:
            every = file.size("sliding_window_pattern", 4)
        windows = read_windows(file, window, lambda n: SLIDING if (n + 1) % every else FULL)
        eps, mlp, rope = file.get("rms_norm_eps", float), read_gated_mlp(file), read_rope(file)
        layers = [
            LayerConfig(
                mixer=read_attention(
                    file,
                    rope=rope if w or not window else None,
                    window=w,
                    qk_norm="head",
                    qk_norm_eps=eps,
                    qkv_bias=False,
                    out_bias=False,
                ),
                mlp=mlp,
            )
            for w in windows
        ]
        return read_model(file, layers)
