"""Phi-3, 3.5 and Phi-4 in GGUF files. Projections are fused as in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import FUSED_MLP, NORMS


def read_phi3(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Phi-3: the sliding window (0 in the file: none), and the context length before LongRoPE."""
    length = file.size("phi3.rope.scaling.original_context_length", values["max_position_embeddings"])
    window = file.size("phi3.attention.sliding_window", 0)
    return {"sliding_window": window or None, "original_max_position_embeddings": length}


FAMILIES = {
    "phi3": GgufFamily(
        architecture="Phi3ForCausalLM",
        parts=NORMS | {"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"} | FUSED_MLP,
        read_config=read_phi3,
    )
}
