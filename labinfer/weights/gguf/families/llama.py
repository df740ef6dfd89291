"""Llama, Mixtral, SmolLM3, Mistral 3 and Ministral 3 in GGUF files. Query and key rows are permuted, as llama.cpp rotates adjacent rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.weights.gguf.family import GgufFamily, Order
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import DENSE

PERMUTED: dict[str, Order] = {"self_attn.q_proj": "rotated pairs", "self_attn.k_proj": "rotated pairs"}
MIXTRAL_EXPERTS = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}


def read_llama(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Mixtral, a ``llama`` with experts; none for Llama."""
    if not (num_experts := file.size("llama.expert_count", 0)):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": num_experts,
        "num_experts_per_tok": file.size("llama.expert_used_count"),
        "sliding_window": None,
    }


def read_mistral3(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Mistral 3: the class name, no sliding window, and Ministral's scaling of queries by their position."""
    own: dict[str, Any] = {"sliding_window": None}
    rope = dict(values["rope_parameters"])
    if (sharpness := file.get("mistral3.rope.scaling.yarn_log_multiplier", float, 0.0)) != 0:
        rope |= {"mscale": sharpness, "mscale_all_dim": sharpness}
    if beta := file.get("mistral3.attention.temperature_scale", float, 0.0):
        own["architectures"] = ["Ministral3ForCausalLM"]
        rope["llama_4_scaling_beta"] = beta
    return own | {"rope_parameters": rope}


FAMILIES = {
    "llama": GgufFamily(
        architecture="LlamaForCausalLM", parts=DENSE | MIXTRAL_EXPERTS, orders=PERMUTED, read_config=read_llama
    ),
    "smollm3": GgufFamily(
        architecture="SmolLM3ForCausalLM", parts=DENSE, orders=PERMUTED, constants={"no_rope_layer_interval": 4}
    ),
    "mistral3": GgufFamily(architecture="MistralForCausalLM", parts=DENSE, orders=PERMUTED, read_config=read_mistral3),
}
