"""Keys of ``config.json`` that only one family has, from the metadata of its GGUF files. Does not import torch.

Source: ggml-org/llama.cpp, conversion/ (metadata that it writes) and src/models/ (values that are hard-coded).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.file import GgufFile

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA_27B_LAYERS = 62
"""Number of layers of Gemma 3 27B, whose query scale is not derived from the head size."""
LOG_MULTIPLIER = 0.1
"""``yarn_log_multiplier`` in DeepSeek GGUF files is this factor times ``mscale_all_dim``."""
SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""
DEEPSEEK_V3 = {"n_routed_experts": 256}, {"n_group": 8, "topk_group": 4}
"""Config values that identify DeepSeek V3 in GGUF files without metadata of expert groups (files of older versions of llama.cpp),
and its expert groups."""


def read_gemma3(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Gemma 3: sliding windows, rope parameters of each layer type, and query scale.

    Raises:
        UserError: a value has an unexpected type.
    """
    rope, sliding = values["rope_parameters"], "gemma3.attention.sliding_window"
    local = {"rope_type": "default", "rope_theta": file.get("gemma3.rope.freq_base_swa", float, 10000.0)}
    own: dict[str, Any] = {"rope_parameters": {FULL: rope, SLIDING: local}}
    num_layers = values["num_hidden_layers"]
    if sliding in file:
        own |= {"sliding_window": file.size(sliding)} | _pattern(file, f"{sliding}_pattern", num_layers)
    else:
        own["layer_types"] = [FULL] * num_layers
    head_size = values["hidden_size"] // max(1, values["num_attention_heads"])
    own["query_pre_attn_scalar"] = head_size if num_layers == GEMMA_27B_LAYERS else values.get("head_dim", head_size)
    if "gemma3.final_logit_softcapping" in file:
        own["final_logit_softcapping"] = file.get("gemma3.final_logit_softcapping", float)
    return own


def _pattern(file: GgufFile, key: str, num_layers: int) -> dict[str, Any]:
    """Key for the layers with a sliding window: all but every n-th (the metadata is a number n), or a flag for each layer."""
    numbers = file.numbers(key)
    if len(numbers) == 1 and type(numbers[0]) is int:
        return {"sliding_window_pattern": numbers[0]}
    return {"layer_types": [SLIDING if flag else FULL for flag in numbers[:num_layers]]} if numbers else {}


def read_gpt_oss(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for gpt-oss: rope with an untruncated YaRN correction range, which GGUF files do not state."""
    return {"rope_parameters": values["rope_parameters"] | {"truncate": False}}


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
        "routed_scaling_factor": file.get("deepseek2.expert_weights_scale", float, 1.0),
        "norm_topk_prob": file.get("deepseek2.expert_weights_norm", bool, False),
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
    groups = {
        key: file.size(f"deepseek2.{name}")
        for key, name in (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count"))
        if f"deepseek2.{name}" in file
    }
    if chooses == SOFTMAX:
        method = "group_limited_greedy" if groups.get("n_group", 1) > 1 else "greedy"
        return groups | {"topk_method": method}
    if chooses != SIGMOID:
        raise UserError(
            f"{file.path}: deepseek2.expert_gating_func {chooses} is not supported; softmax and sigmoid are"
        )
    sizes, own_groups = DEEPSEEK_V3
    if not groups:
        groups = own_groups if sizes.items() <= values.items() else {"n_group": 1, "topk_group": 1}
    return groups | {"architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": True}
