"""GGUF files of bfloat16 checkpoints of Qwen2, Qwen3, Qwen3-MoE, Qwen3.5, Llama and Gemma 3 (text), for llama.cpp.

Sizes and weights, and a vocabulary of made-up words, which OpenVINO does not do without. Tensors are named by gguf's own
map; what else changes is what llama.cpp's loader asks for (``src/models/`` of https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_TENSOR as KIND
from harness import Unavailable

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
"""llama.cpp's architectures by model type."""
HYBRIDS = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
NORMS_LESS_ONE = (*HYBRIDS, gguf.MODEL_ARCH.GEMMA3)
"""Architectures whose checkpoints store the weights of norms less 1; llama.cpp reads the whole weights."""
HYBRID_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Qwen3.5's values of the keys that a config.json may leave out."""
MROPE_SECTIONS = (11, 11, 10, 0)
"""Rotary pairs by time, height and width, which are the same number in a text."""
FLOAT32 = (KIND.FFN_GATE_INP, KIND.FFN_GATE_INP_SHEXP, KIND.SSM_CONV1D)
"""Matrices that llama.cpp has in float32, as it has all vectors."""
BY_VALUE_HEAD = (KIND.ATTN_QKV, KIND.ATTN_GATE, KIND.SSM_CONV1D, KIND.SSM_ALPHA, KIND.SSM_BETA, KIND.SSM_A, KIND.SSM_DT)
"""Tensors of Gated DeltaNet whose rows, or the last of them, belong to value heads."""


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Convert a checkpoint folder to one file.

    Raises:
        Unavailable: the model type or a tensor is not known here.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise Unavailable(f"model type {config['model_type']}; this converter knows {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[config["model_type"]]
    hybrid = architecture in HYBRIDS
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    if hybrid:
        config = HYBRID_DEFAULTS | config
        _add_hybrid_sizes(writer, config)
    _add_sizes(writer, config)
    _add_rope_scaling(writer, config)
    if architecture is gguf.MODEL_ARCH.GEMMA3:
        _add_sliding_window(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, bits in _read_tensors(checkpoint):
        match = names.get_type_and_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        if not match:
            raise Unavailable(f"tensor {name}; this converter does not know it")
        kind, new_name = match
        if kind is KIND.SSM_CONV1D:
            bits = bits.squeeze(1)
        bits = _tile_value_heads(kind, bits, config)
        if architecture is gguf.MODEL_ARCH.LLAMA:
            bits = _interleave_rotary_pairs(kind, bits, config)
        if bits.ndim == 1 or kind in FLOAT32:
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            if kind is KIND.SSM_A:
                values = -np.exp(values)
            elif architecture in NORMS_LESS_ONE and name.endswith("norm.weight") and kind is not KIND.SSM_NORM:
                values += 1
            writer.add_tensor(new_name, values)
        else:
            writer.add_tensor(new_name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, config["vocab_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_rope_scaling(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the scaling of the rotary frequencies: one factor for all, or for Llama 3 a tensor with a divisor of each frequency.

    Raises:
        Unavailable: the converter does not know the type of scaling.
    """
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config, scaling))
    elif scaling["rope_type"] != "default":
        raise Unavailable(f"rope_type {scaling['rope_type']}; this converter knows linear and llama3")


def _llama3_divisors(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    """Divisor of each rotary frequency: 1 for short wavelengths, ``factor`` for long ones, and between them one that makes the
    frequency linear in the number of turns in the original context."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = config["rope_theta"] ** -(np.arange(0, size, 2) / size)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clip(0, 1)
    return (1 / (kept + (1 - kept) / scaling["factor"])).astype(np.float32)


def _add_sliding_window(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add Gemma 3's window. llama.cpp knows the rest by itself: which layers have it, that these rotate with a base of 10,000, and the
    scales of embeddings and queries.

    Raises:
        Unavailable: the checkpoint differs from what llama.cpp assumes.
    """
    assumed = {
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": config["head_dim"],
    }
    for key, value in assumed.items():
        if config.get(key, value) != value:
            raise Unavailable(f"{key} {config[key]}; llama.cpp assumes {value} for Gemma 3")
    writer.add_sliding_window(config["sliding_window"])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a synthetic vocabulary: 256 letters, and special tokens for the rest; the last one ends a sequence."""
    letters = [chr(256 + number) for number in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*letters, *(f"<|{number}|>" for number in range(256, size))])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * (size - 256))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def _add_hybrid_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of Gated DeltaNet, under the names of a state space model, and of the attention beside it."""
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_rope_dimension_sections(MROPE_SECTIONS)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def _tile_value_heads(kind: KIND, bits: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """The first value head of every key head, then the second of every one; a checkpoint has those of one side by side."""
    if kind not in (*BY_VALUE_HEAD, KIND.SSM_OUT):
        return bits
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    axis = 1 if kind is KIND.SSM_OUT else 0
    begin = 2 * keys * config["linear_key_head_dim"] if kind in (KIND.ATTN_QKV, KIND.SSM_CONV1D) else 0  # after q and k
    tiled = np.arange(begin, bits.shape[axis]).reshape(keys, values // keys, -1).swapaxes(0, 1).ravel()
    return bits.take(np.concatenate([np.arange(begin), tiled]), axis)


def _interleave_rotary_pairs(kind: KIND, bits: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Reorder the rows of Llama's query and key heads: a checkpoint pairs a row of a head's first half with one of its second half,
    llama.cpp pairs neighbours."""
    heads = {KIND.ATTN_Q: config["num_attention_heads"], KIND.ATTN_K: config["num_key_value_heads"]}.get(kind)
    if heads is None:
        return bits
    return bits.reshape(heads, 2, -1, *bits.shape[1:]).swapaxes(1, 2).reshape(bits.shape)


def _read_tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bits (uint16) of all tensors; at last those of each layer's experts, one EOI for all, without the number."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, bits in _read_bfloat16(file):
            if expert := re.fullmatch(r"(.+\.experts)\.(\d+)(\..+)", name):
                stacks.setdefault(expert[1] + expert[3], {})[int(expert[2])] = bits
            else:
                yield name, bits
    for name, experts in stacks.items():
        yield name, np.stack([experts[number] for number in sorted(experts)])


def _read_bfloat16(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bits (uint16) of the tensors of a safetensors file; NumPy has no bfloat16."""
    data = np.memmap(file, np.uint8, mode="r")
    header_bytes = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8 : 8 + header_bytes])).items():
        if name != "__metadata__":
            if entry["dtype"] != "BF16":
                raise RuntimeError(f"{name} is {entry['dtype']}; this converter reads bfloat16 checkpoints")
            begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])
