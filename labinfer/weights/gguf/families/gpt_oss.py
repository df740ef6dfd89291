"""gpt-oss in GGUF files. Gate and up projections of its experts, with their biases, are separate tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, EXPERT_STACKS, LATE_NORMS


def read_gpt_oss(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for gpt-oss: rope with an untruncated YaRN correction range, which GGUF files do not state."""
    return {"rope_parameters": values["rope_parameters"] | {"truncate": False}}


FAMILIES = {
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        parts=LATE_NORMS
        | ATTENTION
        | {
            "mlp.router": "ffn_gate_inp",
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",  # before down_proj, which matches the name, too
            **EXPERT_STACKS,
            "self_attn.sinks": "attn_sinks.weight",
        },
        sizes={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        joins={
            "mlp.experts.gate_up_proj_bias": ("interleaved", "mlp.experts.gate_proj.bias", "mlp.experts.up_proj.bias"),
        },
        read_config=read_gpt_oss,
    )
}
