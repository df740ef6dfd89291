"""Granite 3, and Granite 4 without Mamba layers, in GGUF files. Query and key rows are permuted as Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.families.llama import PERMUTED
from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, DENSE, NORMS

MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def read_granite(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Granite: the factors on embeddings, attention scores and residual branches, and the divisor of logits."""
    keys = {key: f"{file.prefix}.{name}" for key, name in MULTIPLIERS.items()}
    return {key: file.get(name, float) for key, name in keys.items() if name in file}


FAMILIES = {
    "granite": GgufFamily(architecture="GraniteForCausalLM", parts=DENSE, orders=PERMUTED, read_config=read_granite),
    "granitemoe": GgufFamily(
        architecture="GraniteMoeForCausalLM",
        parts=NORMS
        | ATTENTION
        | {
            "block_sparse_moe.router.layer": "ffn_gate_inp",
            "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
            "block_sparse_moe.experts.up_proj": "ffn_up_exps",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps",
        },
        sizes={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        orders=PERMUTED,
        read_config=read_granite,
    ),
}
