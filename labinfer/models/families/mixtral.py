"""Mixtral (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from labinfer.models.config import (
    LayerConfig,
    ModelConfig,
    read_attention,
    read_gated_mlp,
    read_model,
    require_one_type,
)
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.layers.router import read_router
from labinfer.weights.checkpoint_names import CheckpointNames


class MixtralForCausalLM(Decoder):
    """Mistral with a mixture of experts in every layer."""

    names = CheckpointNames(
        renamed={"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
    )

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_aliases(num_experts="num_local_experts").with_defaults(
            num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, max_position_embeddings=131072
        )
        experts, chosen = file.size("num_local_experts", 8), file.size("num_experts_per_tok", 2)
        columns = read_gated_mlp(file).intermediate_size
        mixture = MixtureConfig(router=read_router(file, experts, chosen), intermediate_size=columns)
        window = file.size("sliding_window") if file.values.get("sliding_window") is not None else 0
        require_one_type(file, window)
        attention = read_attention(file, window=window, qkv_bias=False, out_bias=False)
        return read_model(file, [LayerConfig(mixer=attention, mlp=mixture)] * file.size("num_hidden_layers"))
