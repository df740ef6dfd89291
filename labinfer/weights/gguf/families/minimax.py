"""MiniMax-M2 in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.families.routing import SIGMOID, need_scores
from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, HEAD_NORMS, NORMS


def read_minimax(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """No further keys for MiniMax-M2.

    Raises:
        UserError: the experts' scores are not sigmoids.
    """
    need_scores(file, SIGMOID)
    return {}


FAMILIES = {
    "minimax-m2": GgufFamily(
        architecture="MiniMaxM2ForCausalLM",
        parts=NORMS
        | ATTENTION
        | HEAD_NORMS
        | {
            "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.experts.w1": "ffn_gate_exps",
            "block_sparse_moe.experts.w3": "ffn_up_exps",
            "block_sparse_moe.experts.w2": "ffn_down_exps",
        },
        sizes={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        read_config=read_minimax,
    )
}
