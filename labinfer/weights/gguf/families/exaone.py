"""EXAONE 4.0 in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, HEAD_NORMS, MLP, POST_NORMS

FULL, SLIDING = "full_attention", "sliding_attention"


def read_exaone4(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for EXAONE 4.0: sliding windows. A model without them (1.2B) has full attention in all layers."""
    window = file.size("exaone4.attention.sliding_window", 0)
    if not window:
        return {"sliding_window": None}
    pattern = file.numbers("exaone4.attention.sliding_window_pattern")[: values["num_hidden_layers"]]
    types = [SLIDING if is_sliding else FULL for is_sliding in pattern]
    return {"sliding_window": window} | ({"layer_types": types} if types else {})


FAMILIES = {
    "exaone4": GgufFamily(
        architecture="Exaone4ForCausalLM", parts=ATTENTION | MLP | HEAD_NORMS | POST_NORMS, read_config=read_exaone4
    )
}
