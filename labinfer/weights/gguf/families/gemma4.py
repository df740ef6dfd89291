"""Gemma 4 in GGUF files. Its layers of full attention have other head sizes, and rope factors for a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.file import GgufFile
from labinfer.weights.gguf.parts import ATTENTION, HEAD_NORMS, MLP, OUTER, SANDWICH_NORMS

FULL, SLIDING = "full_attention", "sliding_attention"
UNROTATED = 1e29
"""Rope factors of frequencies that are not rotated are at least this large; llama.cpp writes 1e30."""


def read_gemma4(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for Gemma 4: sizes, rope parameters and sliding windows by layer, experts, and per-layer embeddings.

    Raises:
        UserError: a value has an unexpected type, or a combination of values that no config can have.
    """
    num_layers, num_shared = values["num_hidden_layers"], file.size("gemma4.attention.shared_kv_layers", 0)
    pattern = file.numbers("gemma4.attention.sliding_window_pattern")[:num_layers]
    if len(pattern) != num_layers:
        raise UserError(
            f"{file.path}: gemma4.attention.sliding_window_pattern should have a flag for each of {num_layers} layers"
        )
    heads = file.sizes_by_layer("gemma4.attention.head_count_kv", num_layers)
    columns = file.sizes_by_layer("gemma4.feed_forward_length", num_layers)
    doubled = [columns[0]] * (num_layers - num_shared) + [2 * columns[0]] * num_shared
    if columns not in ([columns[0]] * num_layers, doubled):
        raise UserError(
            f"{file.path}: gemma4.feed_forward_length {columns!r:.80} is not supported; all layers have one size, or the last "
            f"{num_shared} have twice the size of the others"
        )
    size = file.size("gemma4.attention.key_length")
    sliding_size = file.size("gemma4.attention.key_length_swa", size)
    if (rotated := file.size("gemma4.rope.dimension_count_swa", sliding_size)) != sliding_size:
        raise UserError(
            f"{file.path}: gemma4.rope.dimension_count_swa {rotated} differs from key_length_swa, which is not supported"
        )
    embedded = file.size("gemma4.embedding_length_per_layer_input", 0)
    own = {
        "head_dim": sliding_size,
        "global_head_dim": size,
        "num_key_value_heads": heads[0],
        "per_layer_config": {
            str(n): {"head_dim": sliding_size if is_sliding else size, "num_key_value_heads": heads[n]}
            for n, is_sliding in enumerate(pattern)
        },
        "sliding_window": file.size("gemma4.attention.sliding_window"),
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in pattern],
        "attention_k_eq_v": any(f"blk.{n}.attn_v.weight" not in file.tensors for n in range(num_layers - num_shared)),
        "num_kv_shared_layers": num_shared,
        "intermediate_size": columns[0],
        "use_double_wide_mlp": columns == doubled,
        "rope_parameters": {
            FULL: _full_rope(file, values["rope_parameters"]),
            SLIDING: {"rope_type": "default", "rope_theta": file.get("gemma4.rope.freq_base_swa", float, 10000.0)},
        },
        "hidden_size_per_layer_input": embedded,
    }
    if embedded and (table := file.tensors.get("per_layer_token_embd.weight")) is not None:
        own["vocab_size_per_layer_input"] = table.shape[0]
    if num_experts := file.size("gemma4.expert_count", 0):
        own |= {
            "enable_moe_block": True,
            "num_experts": num_experts,
            "top_k_experts": file.size("gemma4.expert_used_count"),
            "moe_intermediate_size": file.size("gemma4.expert_feed_forward_length"),
        }
    if "gemma4.final_logit_softcapping" in file:
        own["final_logit_softcapping"] = file.get("gemma4.final_logit_softcapping", float)
    return own


def _full_rope(file: GgufFile, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters of layers with full attention.

    Args:
        rope: rope parameters of the file as other architectures have them: factor 1 for each frequency that is rotated, then
            ``UNROTATED`` or more.
    """
    factors = rope.get("short_factor")
    if factors is None:
        raise UserError(f"{file.path} has no tensor rope_freqs.weight; is the file complete?")
    rotated = sum(factor == 1 for factor in factors)
    if not rotated or not all(factor >= UNROTATED for factor in factors[rotated:]):
        raise UserError(
            f"{file.path}: rope_freqs.weight should be 1 for the first frequencies, and at least {UNROTATED:g} for the others"
        )
    fraction = {"partial_rotary_factor": rotated / len(factors)}
    return {"rope_type": "proportional", "rope_theta": rope["rope_theta"]} | fraction


FAMILIES = {
    "gemma4": GgufFamily(
        architecture="Gemma4ForCausalLM",
        parts=ATTENTION
        | MLP
        | HEAD_NORMS
        | SANDWICH_NORMS
        | {
            "layer_scalar": "layer_output_scale.weight",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "router.proj": "ffn_gate_inp",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "experts.gate_proj": "ffn_gate_exps",
            "experts.up_proj": "ffn_up_exps",
            "experts.down_proj": "ffn_down_exps",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        outer=OUTER
        | {
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm",
        },
        sizes_by_layer=("intermediate_size", "num_key_value_heads"),
        read_config=read_gemma4,
    )
}
