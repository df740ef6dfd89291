"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671)."""

from __future__ import annotations

from dataclasses import replace

from labinfer.models.config import LayerConfig, ModelConfig, read_attention, read_gated_mlp, read_model, read_windows
from labinfer.models.config_file import FULL, SLIDING, ConfigFile
from labinfer.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Llama with biases on queries, keys and values; later layers may have a sliding window."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> ModelConfig:
        mlp = replace(read_gated_mlp(file), bias=False)
        layers = [
            LayerConfig(mixer=read_attention(file, qkv_bias=True, out_bias=False, window=window), mlp=mlp)
            for window in read_qwen_windows(file)
        ]
        return read_model(file, layers)


def read_qwen_windows(file: ConfigFile) -> tuple[int, ...]:
    """Sliding-window size of each layer, from ``layer_types`` or ``max_window_layers``, with Transformers' defaults."""
    window = 0
    named_none = (
        "sliding_window" in file.values and file.values["sliding_window"] is None
    )  # an explicit null overrides the default
    if file.get("use_sliding_window", bool, False) and not named_none:
        window = file.size("sliding_window", 4096)
    first = file.get("max_window_layers", int, 28)
    return read_windows(file, window, lambda layer: SLIDING if window and layer >= first else FULL)
