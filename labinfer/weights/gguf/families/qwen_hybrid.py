"""Qwen3.5, dense and with experts, and Qwen3-Next in GGUF files.

In files of Qwen3.5 the value heads of Gated DeltaNet are in another order. In files of Qwen3-Next they are not, and the projections are
split as in Qwen3.5; so Qwen3-Next is read as a Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.family import FUSED_EXPERTS, GgufFamily, Halves
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import (
    DENSE,
    EXPERT_SIZES,
    EXPERTS,
    HEAD_NORMS,
    INNER_SIZE,
    LATE_NORMS,
    MLP,
    SHARED_EXPERT,
    SHARED_SIZES,
)

DELTA_NET = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
DELTA_SIZES = {
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    INNER_SIZE: "ssm.inner_size",
}
QWEN35 = GgufFamily(
    architecture="Qwen3_5ForCausalLM",
    parts=DENSE | HEAD_NORMS | DELTA_NET | LATE_NORMS,
    sizes=DELTA_SIZES,
    orders={
        "linear_attn.in_proj_qkv": "tiled values behind keys",
        "linear_attn.conv1d": "tiled values behind keys",
        "linear_attn.in_proj_z": "tiled values",
        **dict.fromkeys(
            [f"linear_attn.{part}" for part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias")], "tiled heads"
        ),
    },
    column_orders={"linear_attn.out_proj": "tiled values"},
    changes={"linear_attn.A_log": "log of negated"}
    | dict.fromkeys(("model.norm", *LATE_NORMS, *HEAD_NORMS), "less one"),
)
QWEN35_MOE = replace(
    QWEN35,
    architecture="Qwen3_5MoeForCausalLM",
    parts={name: stored for name, stored in QWEN35.parts.items() if name not in MLP} | EXPERTS | SHARED_EXPERT,
    sizes=DELTA_SIZES | EXPERT_SIZES | SHARED_SIZES,
)


def read_qwen3_next(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """No further keys for Qwen3-Next.

    Raises:
        UserError: the file was made before the input projections were split.
    """
    if any(name.endswith(".ssm_in.weight") for name in file.tensors):
        raise UserError(
            f"{file.path} has tensors ssm_in of an early version of llama.cpp, which are not supported; get a newer file of the model"
        )
    return {}


QWEN3_NEXT = replace(
    QWEN35_MOE,
    halves=(FUSED_EXPERTS, Halves("ssm_ba", "ssm_beta", "ssm_alpha", count="linear_num_key_heads")),
    orders={},
    column_orders={},
    read_config=read_qwen3_next,
)
FAMILIES = {"qwen35": QWEN35, "qwen35moe": QWEN35_MOE, "qwen3next": QWEN3_NEXT}
