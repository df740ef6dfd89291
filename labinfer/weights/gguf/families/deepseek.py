"""DeepSeek's latent attention and experts in GGUF files. Keys and values of latents are separate tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.families.routing import SIGMOID, SOFTMAX, read_routing
from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import EXPERTS, MLP, MTP, NORMS, ROUTED_SIZES, ROUTER_BIAS, SHARED_EXPERTS

LATENTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.o_proj": "attn_output",
}
LOG_MULTIPLIER = 0.1
"""``yarn_log_multiplier`` in DeepSeek GGUF files is this factor times ``mscale_all_dim``."""
DEEPSEEK_V3 = {"n_routed_experts": 256}, {"n_group": 8, "topk_group": 4}
"""Config values that identify DeepSeek V3 in GGUF files without metadata of expert groups (files of older versions of llama.cpp),
and its expert groups."""


def read_deepseek2(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for DeepSeek: class name of the model with latent attention, head sizes, and routing method.

    Raises:
        UserError: a value has an unexpected type, or the routing method is not supported.
    """
    rotated, is_new = values["qk_rope_head_dim"], "deepseek2.attention.key_length_mla" in file
    key_size, value_size = (
        file.size(f"deepseek2.attention.{name}_length{'_mla' if is_new else ''}") for name in ("key", "value")
    )
    if key_size <= rotated:
        raise UserError(
            f"{file.path}: keys of {key_size} dimensions cannot have {rotated} rotary dimensions and others without"
        )
    own: dict[str, Any] = {
        "qk_nope_head_dim": key_size - rotated,
        "v_head_dim": value_size,
        "num_key_value_heads": values["num_attention_heads"],
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensors,
    }
    if "deepseek2.attention.q_lora_rank" in file:
        own["q_lora_rank"] = file.size("deepseek2.attention.q_lora_rank")
    if (multiplier := file.get("deepseek2.rope.scaling.yarn_log_multiplier", float, 0.0)) != 0:
        sharpness = round(multiplier / LOG_MULTIPLIER, 6)  # the metadata has the decimal number in float32
        sharpened = {"mscale": sharpness, "mscale_all_dim": sharpness}
        own["rope_parameters"] = values["rope_parameters"] | sharpened
    return own | _router(file, values)


def _router(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    chooses = file.size("deepseek2.expert_gating_func", SIGMOID if has_bias else SOFTMAX)
    own = read_routing(file)
    if chooses == SOFTMAX:
        method = "group_limited_greedy" if own.get("n_group", 1) > 1 else "greedy"
        return own | {"topk_method": method}
    if chooses != SIGMOID:
        raise UserError(
            f"{file.path}: deepseek2.expert_gating_func {chooses} is not supported; softmax and sigmoid are"
        )
    sizes, own_groups = DEEPSEEK_V3
    if "n_group" not in own:
        own |= own_groups if sizes.items() <= values.items() else {"n_group": 1, "topk_group": 1}
    return own | {"architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": True}


FAMILIES = {
    "deepseek2": GgufFamily(
        architecture="DeepseekV2ForCausalLM",
        parts=NORMS | LATENTS | MLP | ROUTER_BIAS | EXPERTS | SHARED_EXPERTS | MTP,
        sizes=ROUTED_SIZES | {"kv_lora_rank": "attention.kv_lora_rank", "qk_rope_head_dim": "rope.dimension_count"},
        joins={
            "self_attn.kv_b_proj.weight": ("heads", "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"),
        },
        read_config=read_deepseek2,
    )
}
