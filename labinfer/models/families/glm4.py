"""GLM-4-0414 (GLM team 2024, arXiv:2406.12793; model card of zai-org/GLM-4-9B-0414)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class Glm4ForCausalLM(Decoder):
    """Sandwich norms; half of each head is rotated, in interleaved pairs."""

    norm_placement = "sandwich"
    names = CheckpointNames(
        renamed={
            "self_attn_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
        fused={("gate_proj", "up_proj"): "gate_up_proj"},
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(
            attention_bias=True,
            head_dim=128,
            num_key_value_heads=2,
            partial_rotary_factor=0.5,
            rms_norm_eps=1.5625e-07,
            max_position_embeddings=131072,
        )
        attention = read_attention(file, rope=read_rope(file, partial=True, interleaved=True), out_bias=False)
        layer = LayerConfig(mixer=attention, mlp=read_gated_mlp(file))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
