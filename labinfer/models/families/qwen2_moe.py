"""Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671; model card of Qwen/Qwen1.5-MoE-A2.7B)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.families.layers.mixture import MixtureConfig
from labinfer.models.families.qwen3_moe import read_qwen_mlps, read_qwen_router
from labinfer.models.layers.mlp import GatedMLPConfig


class Qwen2MoeForCausalLM(Decoder):
    """Qwen2 with routed experts and a shared expert that is weighted by a sigmoid gate."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(
            moe_intermediate_size=1408,
            num_experts_per_tok=4,
            num_local_experts=60,
            shared_expert_intermediate_size=5632,
            max_window_layers=28,
        )
        mixture = MixtureConfig(
            router=read_qwen_router(file),
            intermediate_size=file.size("moe_intermediate_size"),
            shared=GatedMLPConfig(intermediate_size=file.size("shared_expert_intermediate_size")),
            shared_gate=True,
        )
        window = file.size("sliding_window", 4096) if file.get("use_sliding_window", bool, False) else 0
        first_full = file.get("max_window_layers", int)
        windows = read_windows(
            file, window, lambda layer: SLIDING if window and layer % 2 == 0 and layer < first_full else FULL
        )
        bias, mlps = file.get("qkv_bias", bool, True), read_qwen_mlps(file, mixture)
        layers = [
            LayerConfig(mixer=read_attention(file, qkv_bias=bias, out_bias=False, window=window), mlp=mlp)
            for window, mlp in zip(windows, mlps, strict=True)
        ]
        return read_model(file, layers)
