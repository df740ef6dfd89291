"""OLMo 2 and 3 in GGUF files. OLMo 2 is read as an OLMo 3 without sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, HEAD_NORMS, MLP, POST_NORMS

FULL, SLIDING = "full_attention", "sliding_attention"


def read_olmo2(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for OLMo 3: sliding windows, and rope parameters of each layer type (scaled in layers with full attention only)."""
    num_layers, rope = values["num_hidden_layers"], values["rope_parameters"]
    pattern = file.numbers("olmo2.attention.sliding_window_pattern")[:num_layers] or [False] * num_layers
    local = {"rope_type": "default", "rope_theta": file.get("olmo2.rope.freq_base_swa", float, rope["rope_theta"])}
    window = file.size("olmo2.attention.sliding_window", 0)
    return {
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in pattern],
        "rope_parameters": {FULL: rope, SLIDING: local},
        "sliding_window": window or None,
    }


FAMILIES = {
    "olmo2": GgufFamily(
        architecture="Olmo3ForCausalLM", parts=ATTENTION | MLP | HEAD_NORMS | POST_NORMS, read_config=read_olmo2
    )
}
