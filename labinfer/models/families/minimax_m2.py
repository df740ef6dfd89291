"""MiniMax-M2 (model card of MiniMaxAI/MiniMax-M2)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.full_norm_attention import full_norm
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.models.rope_parameters import read_rope
from labinfer.weights.checkpoint_names import CheckpointNames


class MiniMaxM2ForCausalLM(Decoder):
    """Sigmoid-routed experts with a selection bias in every layer; QK norm over all heads."""

    names = CheckpointNames(
        renamed={
            "mlp": "block_sparse_moe",
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
            "gate_proj": "w1",
            "down_proj": "w2",
            "up_proj": "w3",
        },
        has_draft_layers=True,
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(head_dim=128, num_key_value_heads=8, max_position_embeddings=196608, rope_theta=5e6)
        if file.values.get("rotary_dim") is not None:
            file = file.with_defaults(partial_rotary_factor=file.size("rotary_dim") / file.head_size)
        router = read_router(
            file,
            file.size("num_local_experts", 256),
            file.size("num_experts_per_tok", 8),
            scores="sigmoid",
            bias_dims=1,
        )
        eps, columns = file.get("rms_norm_eps", float, 1e-6), read_gated_mlp(file).intermediate_size
        attention = full_norm(read_attention(file, rope=read_rope(file, partial=True), qk_norm_eps=eps))
        layer = LayerConfig(mixer=attention, mlp=MixtureConfig(router=router, intermediate_size=columns))
        return read_model(file, [layer] * file.size("num_hidden_layers"))
