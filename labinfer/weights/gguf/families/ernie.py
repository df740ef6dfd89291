"""ERNIE 4.5, dense and with experts, in GGUF files. Its query and key rows are not permuted: it rotates adjacent rows itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.families.routing import SOFTMAX, need_scores
from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import DENSE, EXPERTS, SHARED_EXPERTS


def read_ernie(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for ERNIE 4.5: whether matrices have biases."""
    return {"use_bias": values["attention_bias"]}


def read_ernie_moe(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for ERNIE 4.5 with experts: the number of shared experts.

    Raises:
        UserError: the experts' scores are not softmaxes.
    """
    need_scores(file, SOFTMAX)
    return read_ernie(file, values) | {"moe_num_shared_experts": file.size("ernie4_5-moe.expert_shared_count", 0)}


FAMILIES = {
    "ernie4_5": GgufFamily(architecture="Ernie4_5ForCausalLM", parts=DENSE, read_config=read_ernie),
    "ernie4_5-moe": GgufFamily(
        architecture="Ernie4_5_MoeForCausalLM",
        parts=DENSE | {"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"} | EXPERTS | SHARED_EXPERTS,
        sizes={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        read_config=read_ernie_moe,
    ),
}
