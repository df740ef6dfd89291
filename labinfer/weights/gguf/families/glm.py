"""GLM-4 and GLM-4.5 to 4.7 in GGUF files. GLM-4.7-Flash is a ``deepseek2``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.families.routing import SIGMOID, need_scores, read_routing
from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import (
    ATTENTION,
    EXPERTS,
    FUSED_MLP,
    HEAD_NORMS,
    LATE_NORMS,
    MLP,
    MTP,
    ROUTED_SIZES,
    ROUTER_BIAS,
    SHARED_EXPERTS,
)


def read_glm4(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """No further keys for GLM-4.

    Raises:
        UserError: the model is GLM-4V, whose query and key rows are in another order.
    """
    if "glm4.rope.dimension_sections" in file:
        raise UserError(f"{file.path} is a GLM-4V (it has glm4.rope.dimension_sections), which is not supported")
    return {}


def read_glm4_moe(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for GLM-4.5: routing, and whether queries and keys are normalized.

    Raises:
        UserError: a value has an unexpected type, or the experts' scores are not sigmoids.
    """
    need_scores(file, SIGMOID)
    return read_routing(file) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


FAMILIES = {
    "glm4": GgufFamily(
        architecture="Glm4ForCausalLM",
        parts=ATTENTION
        | FUSED_MLP
        | {
            "input_layernorm": "attn_norm",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        read_config=read_glm4,
    ),
    "glm4moe": GgufFamily(
        architecture="Glm4MoeForCausalLM",
        parts=LATE_NORMS | ATTENTION | HEAD_NORMS | MLP | ROUTER_BIAS | EXPERTS | SHARED_EXPERTS | MTP,
        sizes=ROUTED_SIZES,
        read_config=read_glm4_moe,
    ),
}
