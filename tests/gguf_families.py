"""What llama.cpp's converter does with the checkpoints of single families: metadata, names and values of tensors. Written here once
more, from ggml-org/llama.cpp, conversion/."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter

Named = tuple[str, torch.Tensor]


def keep(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[Named]:
    yield name, tensor


def no_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    pass


def no_extra(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How files of a family are made."""

    architecture: MODEL_ARCH
    sizes: Callable[[GGUFWriter, dict[str, Any]], None] = no_sizes
    """Adds the family's own metadata."""
    convert: Callable[[str, torch.Tensor, dict[str, Any]], Iterator[Named]] = keep
    """The tensors that become of a checkpoint's; names that begin with ``blk.`` are a file's already."""
    extra: Callable[[dict[str, Any]], dict[str, torch.Tensor]] = no_extra
    """Tensors that no checkpoint has."""
    is_permuted: bool = False
    """Whether rows of queries and keys are permuted as Llama's."""


def head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _gemma4_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    is_sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    num_layers, num_shared = len(is_sliding), config.get("num_kv_shared_layers") or 0
    own = config.get("per_layer_config") or {}
    full = own.get(str(is_sliding.index(False)), {})
    size = full.get("head_dim") or config["global_head_dim"]
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_sliding)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config.get("use_double_wide_mlp"):
        columns = config["intermediate_size"]
        writer.add_feed_forward_length([columns * (1 + (n >= num_layers - num_shared)) for n in range(num_layers)])
    heads = full.get("num_key_value_heads") or config.get("num_global_key_value_heads")
    if heads:
        writer.add_head_count_kv([config["num_key_value_heads"] if sliding else heads for sliding in is_sliding])
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma4(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[Named]:
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield f"{name.removesuffix('.weight')}.weight", tensor
    else:
        yield name, tensor


def _gemma4_frequencies(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    own = config.get("per_layer_config") or {}
    full = own.get(str(config["layer_types"].index("full_attention")), {})
    size = full.get("head_dim") or config["global_head_dim"]
    rotated = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    return {"rope_freqs.weight": torch.tensor([1.0] * rotated + [1e30] * (size // 2 - rotated))}


def _partial_rope(writer: GGUFWriter, config: dict[str, Any]) -> None:
    fraction = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_size(config) * fraction))


def _glm4_moe_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _partial_rope(writer, config)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["n_group"] > 1:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _router_bias(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[Named]:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _minimax_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(config["rotary_dim"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _qwen3_next(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[Named]:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    if not name.endswith("in_proj_qkvz.weight"):
        yield name, tensor
        return
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split([size, size, values, values], dim=1)]
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
    yield f"blk.{layer}.attn_gate.weight", parts[3].contiguous()


def _phi3_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope, original = config["rope_parameters"], config["original_max_position_embeddings"]
    _partial_rope(writer, config)
    writer.add_sliding_window(config.get("sliding_window") or 0)
    writer.add_rope_scaling_orig_ctx_len(original)
    if rope.get("long_factor"):
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
        )


def _phi3_factors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    rope = config["rope_parameters"]
    if not rope.get("long_factor"):
        return {}
    return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}


def _hunyuan_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope, size = config["rope_parameters"], head_size(config)
    if rope["rope_type"] == "dynamic":
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
    if config["model_type"] == "hunyuan_v1_moe":
        used = config["moe_topk"]
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(used[0] if isinstance(used, list) else used)
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])


def _ernie_moe_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


def _ernie_moe(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[Named]:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor.squeeze()


def _olmo2_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _mistral3_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def _gemma2_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _norm_plus_one(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[Named]:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _granite_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _granite_moe(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Iterator[Named]:
    if not name.endswith("input_linear.weight"):
        yield name, tensor
        return
    layer = name.split(".")[2]
    for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
        yield f"blk.{layer}.ffn_{part}_exps.weight", half.contiguous()


def _exaone4_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


CONVERSIONS = {
    "gemma2": Conversion(architecture=MODEL_ARCH.GEMMA2, sizes=_gemma2_sizes, convert=_norm_plus_one),
    "mixtral": Conversion(architecture=MODEL_ARCH.LLAMA, is_permuted=True),
    "granite": Conversion(architecture=MODEL_ARCH.GRANITE, sizes=_granite_sizes, is_permuted=True),
    "granitemoe": Conversion(
        architecture=MODEL_ARCH.GRANITE_MOE, sizes=_granite_sizes, convert=_granite_moe, is_permuted=True
    ),
    "exaone4": Conversion(architecture=MODEL_ARCH.EXAONE4, sizes=_exaone4_sizes),
    "gemma4_text": Conversion(
        architecture=MODEL_ARCH.GEMMA4, sizes=_gemma4_sizes, convert=_gemma4, extra=_gemma4_frequencies
    ),
    "gemma4_unified_text": Conversion(
        architecture=MODEL_ARCH.GEMMA4, sizes=_gemma4_sizes, convert=_gemma4, extra=_gemma4_frequencies
    ),
    "glm4": Conversion(architecture=MODEL_ARCH.GLM4, sizes=_partial_rope),
    "glm4_moe": Conversion(architecture=MODEL_ARCH.GLM4_MOE, sizes=_glm4_moe_sizes, convert=_router_bias),
    "minimax_m2": Conversion(architecture=MODEL_ARCH.MINIMAXM2, sizes=_minimax_sizes, convert=_router_bias),
    "qwen3_next": Conversion(architecture=MODEL_ARCH.QWEN3NEXT, convert=_qwen3_next),
    "phi3": Conversion(architecture=MODEL_ARCH.PHI3, sizes=_phi3_sizes, extra=_phi3_factors),
    "hunyuan_v1_dense": Conversion(architecture=MODEL_ARCH.HUNYUAN_DENSE, sizes=_hunyuan_sizes),
    "hunyuan_v1_moe": Conversion(architecture=MODEL_ARCH.HUNYUAN_MOE, sizes=_hunyuan_sizes),
    "ernie4_5": Conversion(architecture=MODEL_ARCH.ERNIE4_5),
    "ernie4_5_moe": Conversion(architecture=MODEL_ARCH.ERNIE4_5_MOE, sizes=_ernie_moe_sizes, convert=_ernie_moe),
    "seed_oss": Conversion(architecture=MODEL_ARCH.SEED_OSS),
    "olmo2": Conversion(architecture=MODEL_ARCH.OLMO2, sizes=_olmo2_sizes),
    "olmo3": Conversion(architecture=MODEL_ARCH.OLMO2, sizes=_olmo2_sizes),
    "smollm3": Conversion(architecture=MODEL_ARCH.SMOLLM3, is_permuted=True),
    "mistral": Conversion(architecture=MODEL_ARCH.MISTRAL3, sizes=_mistral3_sizes, is_permuted=True),
    "ministral3": Conversion(architecture=MODEL_ARCH.MISTRAL3, sizes=_mistral3_sizes, is_permuted=True),
}
"""By ``model_type``."""
