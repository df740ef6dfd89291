"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388)."""

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
from labinfer.models.families.layers.router import RouterConfig, read_router
from labinfer.models.layers.mixer import MLPConfig


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3 with a mixture of experts in most layers."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(moe_intermediate_size=768, num_experts_per_tok=8)
        mixture = MixtureConfig(router=read_qwen_router(file), intermediate_size=file.size("moe_intermediate_size"))
        window = file.size("sliding_window", 4096) if file.get("use_sliding_window", bool, False) else 0
        require_one_type(file, window)
        eps = file.get("rms_norm_eps", float, 1e-6)
        attention = read_attention(file, qk_norm="head", qk_norm_eps=eps, window=window)
        return read_model(file, [LayerConfig(mixer=attention, mlp=mlp) for mlp in read_qwen_mlps(file, mixture)])


def read_qwen_router(file: ConfigFile) -> RouterConfig:
    """Router with a softmax over all experts; their number is ``num_experts``, or ``num_local_experts`` in Transformers 5."""
    file = file.with_defaults(num_experts=file.values.get("num_local_experts"))
    return read_router(
        file,
        file.size("num_experts"),
        file.size("num_experts_per_tok"),
        normalized=file.get("norm_topk_prob", bool, False),
    )


def read_qwen_mlps(file: ConfigFile, mixture: MixtureConfig) -> list[MLPConfig]:
    """MLP of each layer: the mixture, or a dense MLP in layers that ``mlp_only_layers`` or ``decoder_sparse_step`` exclude."""
    dense, step = read_gated_mlp(file), file.size("decoder_sparse_step", 1)
    without = file.get("mlp_only_layers", list, [])
    return [
        dense if layer in without or (layer + 1) % step else mixture for layer in range(file.size("num_hidden_layers"))
    ]
