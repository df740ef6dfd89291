"""Gemma 2 and 3 in GGUF files. The weights of their norms are stored plus 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, HEAD_NORMS, MLP, SANDWICH_NORMS

FULL, SLIDING = "full_attention", "sliding_attention"
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GEMMA_27B_LAYERS = 62
"""Number of layers of Gemma 3 27B, whose query scale is not derived from the head size."""
GEMMA2_27B_LAYERS = 46
"""Number of layers of Gemma 2 27B; see ``GEMMA_27B_LAYERS``."""


def read_gemma2(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Gemma 2: sliding window, soft caps and query scale. Every other layer has the window.

    Raises:
        UserError: a value has an unexpected type.
    """
    head_size = values["hidden_size"] // max(1, values["num_attention_heads"])
    if values["num_hidden_layers"] != GEMMA2_27B_LAYERS:
        head_size = values.get("head_dim", head_size)
    caps = {name: file.get(f"gemma2.{name}", float) for name in CAPS if f"gemma2.{name}" in file}
    return caps | {
        "sliding_window": file.size("gemma2.attention.sliding_window", 4096),
        "query_pre_attn_scalar": head_size,
    }


def read_gemma3(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Gemma 3: sliding windows, rope parameters of each layer type, and query scale.

    Raises:
        UserError: a value has an unexpected type.
    """
    rope, sliding = values["rope_parameters"], "gemma3.attention.sliding_window"
    local = {"rope_type": "default", "rope_theta": file.get("gemma3.rope.freq_base_swa", float, 10000.0)}
    own: dict[str, Any] = {"rope_parameters": {FULL: rope, SLIDING: local}}
    num_layers = values["num_hidden_layers"]
    if sliding in file:
        own |= {"sliding_window": file.size(sliding)} | _pattern(file, f"{sliding}_pattern", num_layers)
    else:
        own["layer_types"] = [FULL] * num_layers
    head_size = values["hidden_size"] // max(1, values["num_attention_heads"])
    own["query_pre_attn_scalar"] = head_size if num_layers == GEMMA_27B_LAYERS else values.get("head_dim", head_size)
    if "gemma3.final_logit_softcapping" in file:
        own["final_logit_softcapping"] = file.get("gemma3.final_logit_softcapping", float)
    return own


def _pattern(file: GgufFile, key: str, num_layers: int) -> dict[str, Any]:
    """Key for the layers with a sliding window: all but every n-th (the metadata is a number n), or a flag for each layer."""
    numbers = file.numbers(key)
    if len(numbers) == 1 and type(numbers[0]) is int:
        return {"sliding_window_pattern": numbers[0]}
    return {"layer_types": [SLIDING if flag else FULL for flag in numbers[:num_layers]]} if numbers else {}


FAMILIES = {
    "gemma2": GgufFamily(
        architecture="Gemma2ForCausalLM",
        parts=ATTENTION | MLP | SANDWICH_NORMS,
        changes=dict.fromkeys(("model.norm", *SANDWICH_NORMS), "less one"),
        read_config=read_gemma2,
    ),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM",
        parts=ATTENTION | MLP | HEAD_NORMS | SANDWICH_NORMS,
        changes=dict.fromkeys(("model.norm", *SANDWICH_NORMS, *HEAD_NORMS), "less one"),
        read_config=read_gemma3,
    ),
}
