"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on queries, keys and values.

The later layers may see a sliding window only.
"""

from __future__ import annotations

from dataclasses import replace

from labinfer.models.config import ConfigFile, ModelConfig
from labinfer.models.llama import LlamaForCausalLM, read_llama_config

FULL, SLIDING = "full_attention", "sliding_attention"


class Qwen2ForCausalLM(LlamaForCausalLM):
    """See ``LlamaForCausalLM``; the biases and windows come with the config."""


def read_qwen2_config(file: ConfigFile) -> ModelConfig:
    """``config.json`` of ``Qwen2ForCausalLM``.

    Raises:
        UserError: a key is missing or makes no sense.
    """
    config = read_llama_config(file)
    windows = _read_windows(file, config.num_layers)
    return replace(config, qkv_bias=True, out_bias=False, mlp_bias=False, windows=windows)


def _read_windows(file: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """The window of each layer, with Transformers' defaults and its two spellings of which layers have one."""
    window = 0
    named_none = "sliding_window" in file.values and file.values["sliding_window"] is None  # not the default, then
    if file.get("use_sliding_window", bool, False) and not named_none:
        window = file.size("sliding_window", 4096)
    types = file.values.get("layer_types")
    if types is None:
        first = file.get("max_window_layers", int, 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    file.require(
        isinstance(types, list) and len(types) == num_layers and all(kind in (FULL, SLIDING) for kind in types),
        f"layer_types should be a list of {num_layers} times {FULL} or {SLIDING}, not {types!r:.80}",
    )
    file.require(
        window > 0 or SLIDING not in types,
        f"layer_types has {SLIDING}, but no window: set use_sliding_window to true and sliding_window to its size",
    )
    return tuple(window if kind == SLIDING else 0 for kind in types)
