"""Qwen2 and Qwen3, dense and with experts, and the text parts of Qwen2.5-VL and Qwen3-VL, in GGUF files."""

from __future__ import annotations

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.parts import (
    ATTENTION,
    DENSE,
    EXPERT_SIZES,
    EXPERTS,
    HEAD_NORMS,
    NORMS,
    SHARED_EXPERT,
    SHARED_SIZES,
)

QWEN2 = GgufFamily(architecture="Qwen2ForCausalLM", parts=DENSE)
QWEN3 = GgufFamily(architecture="Qwen3ForCausalLM", parts=DENSE | HEAD_NORMS)
QWEN3_MOE = GgufFamily(
    architecture="Qwen3MoeForCausalLM",
    parts=NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
    sizes=EXPERT_SIZES,
    constants={"norm_topk_prob": True},
)
FAMILIES = {
    "qwen2": QWEN2,
    "qwen2vl": QWEN2,
    "qwen2moe": GgufFamily(
        architecture="Qwen2MoeForCausalLM",
        parts=NORMS | ATTENTION | EXPERTS | SHARED_EXPERT,
        sizes=EXPERT_SIZES | SHARED_SIZES,
        constants={"norm_topk_prob": False},
    ),
    "qwen3": QWEN3,
    "qwen3vl": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": QWEN3_MOE,
}
