"""HunYuan dense (model card of tencent/Hunyuan-7B-Instruct)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class HunYuanDenseV1ForCausalLM(Decoder):
    """Llama with QK norm of each head, after the rotation."""

    names = CheckpointNames(
        renamed={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(rms_norm_eps=1e-5)
        eps = file.get("rms_norm_eps", float)
        attention = read_attention(
            file, rope=read_rope(file, fixed_stretch=True), qk_norm="head_after_rotation", qk_norm_eps=eps
        )
        layer = LayerConfig(mixer=attention, mlp=read_gated_mlp(file))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
