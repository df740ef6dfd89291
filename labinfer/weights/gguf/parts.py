"""Names of modules in Hugging Face checkpoints and in GGUF files, shared by several families. Does not import torch.

Source: ggml-org/llama.cpp, gguf-py/gguf/constants.py and gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
LATE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
"""``NORMS`` in architectures whose norm before the MLP is named after the attention."""
SANDWICH_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
"""Norms of layers that have none before attention and MLP."""
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
FUSED_MLP = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
"""MLP whose gate and up projections are one matrix in checkpoints, too."""
DENSE = NORMS | ATTENTION | MLP
EXPERT_STACKS = {
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
EXPERTS = {"mlp.gate": "ffn_gate_inp", **EXPERT_STACKS}
ROUTER_BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
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
MTP = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Modules that only MTP layers of DeepSeek's form have."""
EXPERT_SIZES = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ROUTED_SIZES = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
}
"""Sizes of DeepSeek's form of experts, with dense first layers."""
SHARED_SIZES = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
INNER_SIZE = "linear_inner_size"
"""Key for the size of all value heads of Gated DeltaNet together, from which the size of one head is derived."""
