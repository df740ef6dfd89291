"""HunYuan, dense and with experts, in GGUF files. The base of its rope is already multiplied by the power of ``alpha``."""

from __future__ import annotations

from labinfer.weights.gguf.family import GgufFamily
from labinfer.weights.gguf.parts import ATTENTION, DENSE, EXPERT_STACKS, NORMS

QK_NORMS = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
FAMILIES = {
    "hunyuan-dense": GgufFamily(architecture="HunYuanDenseV1ForCausalLM", parts=DENSE | QK_NORMS),
    "hunyuan-moe": GgufFamily(
        architecture="HunYuanMoEV1ForCausalLM",
        parts=NORMS
        | ATTENTION
        | QK_NORMS
        | EXPERT_STACKS
        | {
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        sizes={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
    ),
}
