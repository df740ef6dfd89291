"""Qwen3 (Yang et al. 2025, arXiv:2505.09388)."""

from __future__ import annotations

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.models.qwen2 import read_qwen_windows


class Qwen3ForCausalLM(Decoder):
    """Qwen2 with QK norm (each query and key head, before the rotation) instead of biases."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        file = file.with_defaults(head_dim=128)
        eps, mlp = file.get("rms_norm_eps", float, 1e-6), read_gated_mlp(file)
        layers = [
            LayerConfig(mixer=read_attention(file, window=window, qk_norm="head", qk_norm_eps=eps), mlp=mlp)
            for window in read_qwen_windows(file)
        ]
        return read_model(file, layers)
