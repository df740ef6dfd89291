"""GGUF architectures: for each, names of sizes and tensors, row orders and value changes. Does not import torch.

Source: ggml-org/llama.cpp, gguf-py/gguf/constants.py (names) and convert_hf_to_gguf.py (changes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from labinfer.base.errors import UserError
from labinfer.weights.gguf.family_configs import read_deepseek2, read_gemma3, read_gpt_oss
from labinfer.weights.gguf.file import GgufFile

INNER_SIZE = "linear_inner_size"
"""Key for the size of all value heads of Gated DeltaNet together, from which the size of one head is derived."""
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
SANDWICH_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
DENSE = NORMS | ATTENTION | MLP
EXPERT_STACKS = {
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",  # replaces the two entries above
    "mlp.experts.down_proj": "ffn_down_exps",
}
EXPERTS = {"mlp.gate": "ffn_gate_inp", **EXPERT_STACKS}
BIASED_EXPERTS = {
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",  # before down_proj, which matches the name, too
    **EXPERT_STACKS,
    "self_attn.sinks": "attn_sinks.weight",
}
SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
SHARED_EXPERT = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
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
EXPERT_SIZES = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SHARED_SIZES = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
DELTA_SIZES = {
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    INNER_SIZE: "ssm.inner_size",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


Order = Literal["rotated pairs", "tiled heads", "tiled values", "tiled values behind keys"]
"""Row orders of GGUF files, see ``orders.py``. In the order of the names: Llama's query and key heads; Gated DeltaNet's value heads
of one row each; its value heads of several rows; its value heads after queries and keys."""
Join = Literal["interleaved", "heads"]
"""How to make one tensor from two that a GGUF file stores. "interleaved": columns of the two alternate (gate and up of gpt-oss).
"heads": each head has its key rows from the first and then its value rows from the second (DeepSeek's ``kv_b_proj``). See ``joins.py``."""
Change = Literal["less one", "log of negated"]
"""Functions that are applied to a tensor's values on loading: ``x - 1``, and ``log(-x)``."""


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """Model architecture in GGUF files: names of its modules and metadata keys, and differences from Hugging Face
    checkpoints."""

    architecture: str
    """Class name of the model in ``config.json``."""
    parts: Mapping[str, str]
    """Modules of a layer: name in checkpoints → name in GGUF files."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Integer keys of ``config.json``, beyond those of all families → metadata keys without the architecture prefix."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``config.json`` whose values llama.cpp hard-codes → the values."""
    orders: Mapping[str, Order] = field(default_factory=dict)
    """Modules whose rows are in another order in GGUF files → name of the order."""
    column_orders: Mapping[str, Order] = field(default_factory=dict)
    """Modules whose columns are in another order in GGUF files → name of the order."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Modules whose values are changed on loading → name of the change."""
    joins: Mapping[str, tuple[Join, str, str]] = field(default_factory=dict)
    """Tensors of a layer that GGUF files store as two tensors each → (``Join``, name of the first, name of the second). The two names are
    keys of ``parts`` with a suffix such as ``.weight``."""
    read_config: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] | None = None
    """Returns further keys of ``config.json``, given the GGUF file and the keys that all families have."""

    def name(self, stored: str, num_layers: int) -> str:
        """Hugging Face name of a tensor, such as ``model.layers.0.mlp.up_proj.weight`` for ``blk.0.ffn_up.weight``.

        MTP layers, which follow the model's own layers, get the prefix ``mtp``. Unknown names are unchanged.
        """
        match = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", stored)
        if match is not None and int(match[1]) >= num_layers:
            return f"mtp.{stored}"
        prefix, table, rest = (f"model.layers.{match[1]}.", self.parts, match[2]) if match else ("", OUTER, stored)
        module, _, suffix = rest.rpartition(".")
        for name, other in table.items():
            if rest == other:
                return f"{prefix}{name}"
            if module == other and suffix in ("weight", "bias"):
                return f"{prefix}{name}.{suffix}"
        return stored


LLAMA = GgufFamily(
    architecture="LlamaForCausalLM",
    parts=DENSE,
    orders={"self_attn.q_proj": "rotated pairs", "self_attn.k_proj": "rotated pairs"},
)
QWEN2 = GgufFamily(architecture="Qwen2ForCausalLM", parts=DENSE)
QWEN2_MOE = GgufFamily(
    architecture="Qwen2MoeForCausalLM",
    parts=NORMS | ATTENTION | EXPERTS | SHARED_EXPERT,
    sizes=EXPERT_SIZES | SHARED_SIZES,
    constants={"norm_topk_prob": False},
)
QWEN3 = GgufFamily(architecture="Qwen3ForCausalLM", parts=DENSE | HEAD_NORMS)
QWEN3_MOE = GgufFamily(
    architecture="Qwen3MoeForCausalLM",
    parts=NORMS | ATTENTION | HEAD_NORMS | EXPERTS,
    sizes=EXPERT_SIZES,
    constants={"norm_topk_prob": True},
)
QWEN35 = GgufFamily(
    architecture="Qwen3_5ForCausalLM",
    parts=DENSE | HEAD_NORMS | DELTA_NET | {"post_attention_layernorm": "post_attention_norm"},
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
    | dict.fromkeys(("model.norm", "input_layernorm", "post_attention_layernorm", *HEAD_NORMS), "less one"),
)
QWEN35_MOE = replace(
    QWEN35,
    architecture="Qwen3_5MoeForCausalLM",
    parts={name: stored for name, stored in QWEN35.parts.items() if name not in MLP} | EXPERTS | SHARED_EXPERT,
    sizes=DELTA_SIZES | EXPERT_SIZES | SHARED_SIZES,
)
GEMMA3 = GgufFamily(
    architecture="Gemma3ForCausalLM",
    parts=ATTENTION | MLP | HEAD_NORMS | SANDWICH_NORMS,
    changes=dict.fromkeys(("model.norm", *SANDWICH_NORMS, *HEAD_NORMS), "less one"),
    read_config=read_gemma3,
)
GPT_OSS = GgufFamily(
    architecture="GptOssForCausalLM",
    parts=NORMS | ATTENTION | BIASED_EXPERTS | {"post_attention_layernorm": "post_attention_norm"},
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
DEEPSEEK2 = GgufFamily(
    architecture="DeepseekV2ForCausalLM",
    parts=NORMS | LATENTS | MLP | {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"} | EXPERTS | SHARED_EXPERTS,
    sizes={
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "n_shared_experts": "expert_shared_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "first_k_dense_replace": "leading_dense_block_count",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
    },
    joins={
        "self_attn.kv_b_proj.weight": ("heads", "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"),
    },
    read_config=read_deepseek2,
)

FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen2moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "deepseek2": DEEPSEEK2,
}
"""Families by ``general.architecture``."""


def read_family(file: GgufFile) -> tuple[str, GgufFamily]:
    """The file's ``general.architecture``, which is also the prefix of its metadata keys, and the family of this architecture.

    Raises:
        UserError: the architecture is not supported.
    """
    name = file.get("general.architecture", str)
    if name not in FAMILIES:
        raise UserError(
            f"{file.path}: architecture {name!r:.60} of GGUF files is not supported; supported are {', '.join(FAMILIES)}"
        )
    return name, FAMILIES[name]
