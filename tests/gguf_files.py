"""GGUF files made of Hugging Face checkpoints, as llama.cpp's converter makes them: names by gguf-py's own map, its writer, and its
quantisation. What a file changes is written here once more, from ggml-org/llama.cpp, convert_hf_to_gguf.py."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoints import CONFIGS
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_families import CONVERSIONS, Conversion
from gguf_vocabularies import add_tokenizer
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from labinfer.functions.packed_weight import TABLES
from labinfer.weights.codes import Codes, unpack

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    **{name: conversion.architecture for name, conversion in CONVERSIONS.items()},
}
"""By ``model_type``."""
FILE_KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 16},
    "gpt-oss": {"swiglu_limit": 7.0},
    "deepseek-v2-lite": {},
    "deepseek-v2": {"attention_bias": False},
    "deepseek-v3": {},
    "kimi-k2": {},
}
"""Kinds of checkpoints, with changes to what files cannot say."""


def file_config(kind: str) -> PretrainedConfig:
    """The config of a checkpoint of which a file can be written."""
    config = CONFIGS[kind]()
    config.update(FILE_KINDS[kind])
    return config


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: str | Mapping[str, str] = "F32",
    pre: str = "gpt-2",
    *,
    merged: bool = False,
    fused: bool = False,
    **writer_options: Any,
) -> Path:
    """A GGUF file of a checkpoint; the path of its first file.

    Args:
        kind: type of all matrices whose rows have whole blocks, also by a part of their names; others are F32.
        pre: name of the way in which the tokenizer splits texts.
        merged: whether latent attention is written as before 2025: keys and values of a latent by one matrix.
        fused: whether gates and ups of experts are one tensor.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], **writer_options)
    _add_sizes(writer, config)
    if config["model_type"] in OWN_SIZES:
        OWN_SIZES[config["model_type"]](writer, config, merged)
    own = CONVERSIONS.get(config["model_type"], Conversion(architecture=architecture))
    own.sizes(writer, config)
    if (checkpoint / "tokenizer.json").exists():
        add_tokenizer(writer, checkpoint, pre)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if config["model_type"] in CONVERTED:
        tensors = dict(entry for name in tensors for entry in _converted(name, tensors[name], config, merged))
    tensors = dict(entry for name in tensors for entry in own.convert(name, tensors[name], config))
    stacks = _stack_experts(tensors)
    for name, tensor in stacks.items():
        stored = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        stored = name if name.startswith("blk.") else stored
        assert stored, name
        if fused and "ffn_up_exps" in stored:
            continue
        if fused and "ffn_gate_exps" in stored:
            stored = stored.replace("gate", "gate_up")
            other = name.replace("gate_proj", "up_proj").replace("w1", "w3")
            tensor = torch.cat((tensor, stacks[other]), dim=1)
        chosen = kind if isinstance(kind, str) else next((kind[part] for part in kind if part in name), "F32")
        _add_tensor(writer, stored, _stored(name, tensor, config), chosen)
    for name, tensor in own.extra(config).items():
        _add_tensor(writer, name, tensor, "F32")
    if (rope := config.get("rope_parameters", {})).get("rope_type") == "llama3":
        _add_tensor(writer, "rope_freqs.weight", _llama3_factors(rope, _head_size(config)), "F32")
    finish(writer)
    return path if path.exists() else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def _add_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "kv_lora_rank" not in config:
        writer.add_key_length(_head_size(config))
        writer.add_value_length(_head_size(config))
    if "num_experts_per_tok" in config:
        counts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        writer.add_expert_count(next(filter(None, counts)))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "linear_num_key_heads" in config:
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        writer.add_rope_dimension_count(int(_head_size(config) * config["rope_parameters"]["partial_rotary_factor"]))
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    rope = config["rope_parameters"].get("full_attention") or config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(_head_size(config))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in {"beta_fast", "beta_slow"}.intersection(rope):
            getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])


def _gemma3_sizes(writer: GGUFWriter, config: dict[str, Any], _: bool) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gpt_oss_sizes(writer: GGUFWriter, config: dict[str, Any], _: bool) -> None:
    writer.add_sliding_window(config["sliding_window"])


def _deepseek2_sizes(writer: GGUFWriter, config: dict[str, Any], merged: bool) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    sizes = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if merged:
        writer.add_key_length(sizes[0])
        writer.add_value_length(sizes[1])
    else:
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(sizes[0])
        writer.add_value_length_mla(sizes[1])
    writer.add_rope_dimension_count(rotated)
    dense = (
        config["mlp_layer_types"].index("sparse") if "mlp_layer_types" in config else config["first_k_dense_replace"]
    )
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if not merged:  # as older files have it
        kind = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kind.SOFTMAX if config["model_type"] == "deepseek_v2" else kind.SIGMOID)
    if sharpness := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * sharpness)


OWN_SIZES = {
    "gemma3_text": _gemma3_sizes,
    "gpt_oss": _gpt_oss_sizes,
    "deepseek_v2": _deepseek2_sizes,
    "deepseek_v3": _deepseek2_sizes,
    "glm4_moe_lite": _deepseek2_sizes,
}
CONVERTED = ("gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Model types with tensors that are stored under other names or in parts."""


def _converted(
    name: str, tensor: torch.Tensor, config: dict[str, Any], merged: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts in which a tensor is stored."""
    if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        prefix, is_bias = name.rpartition(".")[0], name.endswith("_bias")
        rows = tensor.transpose(0, 1) if is_bias else tensor.permute(2, 0, 1)  # gate and up take turns
        for part, own in (("gate_proj", rows[::2]), ("up_proj", rows[1::2])):
            own = own.transpose(0, 1).contiguous()
            yield f"{prefix}.{part}.{'bias' if is_bias else 'weight'}", own
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.transpose(1, 2).contiguous()
    elif name.endswith("experts.down_proj_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("correction_bias", "correction.bias"), tensor
    elif name.endswith("kv_b_proj.weight") and not merged:
        heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
        keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2).contiguous()
        yield name.replace("kv_b_proj", "v_b_proj"), values.contiguous()
    else:
        yield name, tensor


def _stored(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """A tensor as files have it."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    module = name.split(".")[-2] if "." in name else name
    own = CONVERSIONS.get(config["model_type"])
    if (config["model_type"] == "llama" or (own and own.is_permuted)) and module in heads:
        halves = tensor.unflatten(0, (heads[module], 2, -1))  # the halves of each head take turns
        return halves.transpose(1, 2).flatten(0, 2)
    if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
        return tensor + 1
    if "linear_num_key_heads" in config and own is None:
        return _stored_hybrid(name, tensor, config)
    return tensor


def _stored_hybrid(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Of Qwen3.5: norms with one added, and value heads of all key heads in turn."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    part = name.removesuffix(".weight").rpartition(".")[2]
    before = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    if part in ("in_proj_qkv", "conv1d", "in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        tiled = tensor[before:].unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)
        return torch.cat((tensor[:before], tiled))
    if part == "out_proj":
        return tensor.unflatten(1, (keys, values // keys, -1)).transpose(1, 2).flatten(1, 3)
    return tensor


def _stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of a layer's experts in one tensor each."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        else:
            rest[name] = tensor
    return rest | {name: torch.stack([parts[n] for n in sorted(parts)]) for name, parts in stacks.items()}


def _add_tensor(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    values, type_ = tensor.float().numpy(), GGMLQuantizationType[kind]
    if values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0]:
        type_ = GGMLQuantizationType.F32
    writer.add_tensor(name, quantize(values, type_), raw_dtype=type_)


def _llama3_factors(rope: dict[str, Any], head_size: int) -> torch.Tensor:
    """By how much each frequency is divided."""
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for wavelength in (2 * torch.pi / plain).tolist():
        turns = rope["original_max_position_embeddings"] / wavelength
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - blend) / factor + blend))
    return torch.tensor(factors)


def _head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def finish(writer: GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_twin(checkpoint: Path, path: Path, twin: Path) -> Path:
    """The checkpoint with the values that a file has by gguf-py, for families whose rows stay in their order."""
    shutil.copytree(checkpoint, twin, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((checkpoint / "config.json").read_text())
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            expert = re.search(r"\.experts\.(\d+)\.", name)
            found = stored[
                names.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", name), try_suffixes=(".weight", ".bias"))
            ]
            values = torch.tensor(gguf.quants.dequantize(found.data, found.tensor_type))
            tensors[name] = (values[int(expert[1])] if expert else values).view(tensor.shape).contiguous()
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    return twin


STEPS = {
    "Q4_K": 63 * 15,
    "Q5_K": 63 * 31,
    "Q6_K": 127 * 31,
    "IQ4_NL": 127,
    "IQ4_XS": 32 * 127,
    "Q2_K": 15 * 3,
    "Q3_K": 32 * 4,
    "IQ1_S": 15,
    "IQ2_XXS": 43 * 4,
    "IQ2_XS": 43 * 4,
    "IQ2_S": 43 * 4,
    "IQ3_XXS": 62 * 8,
    "IQ3_S": 15 * 31,
}
"""The largest number of types that gguf-py does not quantise to, as a multiple of a block's first scale."""
PLACES = {"Q6_K": 208, "Q2_K": 80, "Q3_K": 108}
"""Position of a block's first scale, where it is not the block's first bytes."""
MINIMA = {"Q4_K": (2, 63), "Q5_K": (2, 63), "Q2_K": (82, 15)}
"""Position of the scale of a block's minima, and its largest factor."""


def quantize(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks as gguf-py makes them; of types that it only reads, random ones of numbers about as large."""
    if kind.name not in STEPS:
        return gguf.quants.quantize(np.ascontiguousarray(values), kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    place = PLACES.get(kind.name, 0)
    blocks[:, place : place + 2] = np.frombuffer(np.float16(0.6 / STEPS[kind.name]).tobytes(), np.uint8)
    if kind.name in MINIMA:
        place, most = MINIMA[kind.name]
        blocks[:, place : place + 2] = np.frombuffer(np.float16(0.3 / most).tobytes(), np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def code_values(codes: Codes) -> torch.Tensor:
    """The weights that codes stand for, float32, in the order of gguf-py's arithmetic."""
    form, numbers = codes.form, code_numbers(codes)
    size = codes.columns[1] - codes.columns[0]
    whole = numbers[:, codes.lead : codes.lead + size].float()
    if form.table:
        whole = torch.tensor(TABLES[form.table])[whole.long()].float()
    elif codes.zeros is None and codes.minima is None:
        whole -= form.middle
    values = whole * spread(codes, codes.scales)
    return values if codes.minima is None else values + spread(codes, codes.minima)


def code_numbers(codes: Codes) -> torch.Tensor:
    """The codes themselves, (outputs, inputs up to whole groups)."""
    if codes.form.bits != 5:
        return unpack(codes.words, codes.form.bits)
    bytes_OG54 = codes.words.view(torch.uint8).unflatten(1, (-1, 5, 4)).long()
    numbers = [
        (word & 31, word // 32 * 4 + bytes_OG54[:, :, 0] // 4**i % 4)
        for i, word in enumerate(bytes_OG54[:, :, 1:].unbind(2))
    ]
    return torch.stack([half for pair in numbers for half in pair], dim=2).flatten(1)


def spread(codes: Codes, of_groups: torch.Tensor) -> torch.Tensor:
    """What groups have, for each of the inputs that are meant."""
    size = codes.columns[1] - codes.columns[0]
    return of_groups.repeat_interleave(codes.form.group, dim=1)[:, codes.lead : codes.lead + size]
