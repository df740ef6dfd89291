"""gguf_config and gguf_generation_config: metadata of a GGUF file as a ``config.json`` and a ``generation_config.json`` of Hugging
Face.

Source: ggml-org/llama.cpp, gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.header import GgufTensor
from labinfer.weights.gguf.parts import INNER_SIZE
from labinfer.weights.gguf.registry import read_family

SIZES = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPTIONAL_SIZES = {
    "intermediate_size": "feed_forward_length",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
END_NAMES = ("eos", "eot", "eom")
"""Names of end tokens in the metadata: end of a text, end of a turn, end of a message."""
KNOWN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>")
"""Texts of end tokens, for files whose metadata names only the end of a text."""
HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Texts of the end tokens of gpt-oss."""
CONTROL = 3
"""Value of ``tokenizer.ggml.token_type`` for control tokens."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors with LongRoPE's factors."""
MAX_BLOCKS = 1024
MAX_FLOATS = 1 << 12
"""Maximum number of elements of a tensor that belongs to the config."""
DTYPES = {"F32": "float32", "F16": "float16"}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Values of a ``config.json`` for the model in a GGUF file.

    Raises:
        UserError: the architecture is not supported, or required metadata is missing.
    """
    prefix, family = read_family(file)
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise UserError(f"{file.path} has no tensor token_embd.weight; is the file complete?")
    drafts, num_blocks = file.size(f"{prefix}.nextn_predict_layers", 0), file.size(f"{prefix}.block_count")
    if not 0 < num_blocks <= MAX_BLOCKS:
        raise UserError(f"{file.path}: {prefix}.block_count is {num_blocks}; models have 1 to {MAX_BLOCKS} layers")
    values = {
        "architectures": [family.architecture],
        "vocab_size": table.shape[0],
        "num_hidden_layers": num_blocks - drafts,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rms_norm_eps": file.get(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        "dtype": _dtype(file),
        "eos_token_id": end_ids(file),
        "pooling_type": file.get(f"{prefix}.pooling_type", int, 0),
        "is_causal": file.get(f"{prefix}.attention.causal", bool, True),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **family.constants,
    }
    has_latents = f"{prefix}.attention.kv_lora_rank" in file  # latent attention takes its head sizes from other keys
    for key, name in (SIZES | dict(family.sizes)).items():
        values[key] = file.size(f"{prefix}.{name}")
    if family.has_draft_layers:
        values["num_nextn_predict_layers"] = drafts
    left_out = {*family.sizes_by_layer, *(("head_dim",) if has_latents else ())}
    for key, name in OPTIONAL_SIZES.items():
        if f"{prefix}.{name}" in file and key not in left_out:
            values[key] = file.size(f"{prefix}.{name}")
    if INNER_SIZE in values:
        values["linear_value_head_dim"] = values[INNER_SIZE] // max(1, values["linear_num_value_heads"])
    if "moe_intermediate_size" in values:  # optional: models without dense MLPs lack it
        values.setdefault("intermediate_size", values["moe_intermediate_size"])
    head_size = values.get("head_dim") or values["hidden_size"] // max(1, values["num_attention_heads"])
    if has_latents:
        head_size = file.size(f"{prefix}.rope.dimension_count")
    elif file.size(f"{prefix}.attention.value_length", head_size) != head_size:
        raise UserError(f"{file.path}: {prefix}.attention.value_length differs from key_length, which is not supported")
    if not any("experts" in name for name in family.parts) and file.size(f"{prefix}.expert_count", 0):
        raise UserError(f"{file.path}: architecture {prefix!r} with experts is not supported")
    if head_size < 1:
        raise UserError(f"{file.path}: its attention heads have a size of {head_size}; is the file complete?")
    values["rope_parameters"] = _rope(file, prefix, head_size)
    return values | (family.read_config(file, values) if family.read_config else {})


def gguf_generation_config(file: GgufFile) -> dict[str, Any]:
    """Values of a ``generation_config.json``: the sampling parameters that the model's authors recommend."""
    keys = {name: f"general.sampling.{key}" for name, key in SAMPLING.items()}
    return {name: file.get(key, int if name == "top_k" else float, 0) for name, key in keys.items() if key in file}


def end_ids(file: GgufFile) -> list[int]:
    """Ids of the tokens that end a generation."""
    known, names = KNOWN_ENDS, END_NAMES
    if (
        file.get("general.architecture", str, "") == "gpt-oss"
    ):  # in gpt-oss, <|end|> ends a message; the answer may go on with another
        known, names = HARMONY_ENDS, END_NAMES[:1]
    ids = {file.get(key, int) for name in names if (key := f"tokenizer.ggml.{name}_token_id") in file}
    kinds = file.numbers("tokenizer.ggml.token_type")
    if CONTROL in kinds:
        texts = file.texts("tokenizer.ggml.tokens")
        ids.update(
            n for n, (text, kind) in enumerate(zip(texts, kinds, strict=False)) if kind == CONTROL and text in known
        )
    return sorted(ids)


def _rope(file: GgufFile, prefix: str, head_size: int) -> dict[str, Any]:
    """Rope parameters (rotary embedding) as a config of Transformers 5 has them.

    Raises:
        UserError: the rope scaling type is not supported.
    """
    kind = file.get(f"{prefix}.rope.scaling.type", str, "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get(f"{prefix}.rope.freq_base", float, 10000.0)}
    rotated = file.size(f"{prefix}.rope.dimension_count", head_size)
    if rotated != head_size:
        rope["partial_rotary_factor"] = rotated / head_size
    if "rope_freqs.weight" in file.tensors:
        factors = _read_floats(file, file.tensors["rope_freqs.weight"])
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    if LONG_FACTORS in file.tensors and SHORT_FACTORS in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": _read_floats(file, file.tensors[SHORT_FACTORS]),
            "long_factor": _read_floats(file, file.tensors[LONG_FACTORS]),
        }
        if f"{prefix}.rope.scaling.attn_factor" in file:
            rope["attention_factor"] = file.get(f"{prefix}.rope.scaling.attn_factor", float)
        if (length := f"{prefix}.rope.scaling.original_context_length") in file:
            rope["original_max_position_embeddings"] = file.size(length)
        return rope
    if kind == "none":
        return rope
    if file.get(f"{prefix}.rope.scaling.attn_factor", float, 1.0) != 1.0:
        raise UserError(f"{file.path}: {prefix}.rope.scaling.attn_factor is not supported")
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{file.path}: {prefix}.rope.scaling.type {kind!r:.40} is not supported; supported are none, linear and yarn"
        )
    rope |= {"rope_type": kind, "factor": file.get(f"{prefix}.rope.scaling.factor", float)}
    if file.get(f"{prefix}.rope.scaling.yarn_ext_factor", float, 1.0) != 1.0:
        raise UserError(f"{file.path}: {prefix}.rope.scaling.yarn_ext_factor is not supported")
    optional = {
        "attention_factor": "yarn_attn_factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    for key, name in optional.items() if kind == "yarn" else ():
        if f"{prefix}.rope.scaling.{name}" in file:
            rope[key] = file.get(f"{prefix}.rope.scaling.{name}", float)
    return rope


def _dtype(file: GgufFile) -> str:
    """Dtype of most weights; bfloat16 if they are quantized."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] += math.prod(tensor.shape)
    return DTYPES.get(counts.most_common(1)[0][0], "bfloat16")


def _read_floats(file: GgufFile, tensor: GgufTensor) -> list[float]:
    """Read a short tensor of float32.

    Raises:
        UserError: the tensor has another type, or is too long.
    """
    count = math.prod(tensor.shape)
    if tensor.type.name != "F32" or count > MAX_FLOATS:
        raise UserError(
            f"{file.path}: tensor {tensor.name} has {count} numbers of type {tensor.type.name}, not at most {MAX_FLOATS} of F32"
        )
    tensor.file.seek(tensor.position)
    return list(struct.unpack(f"<{count}f", tensor.file.read(4 * count)))
