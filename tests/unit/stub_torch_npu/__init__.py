"""A stand-in for torch_npu on CPU tensors: operators compute in plain torch, and refuse what their pages do not allow."""

from __future__ import annotations

from stub_torch_npu import graphs as npu
from stub_torch_npu.attention import npu_fused_infer_attention_score, npu_scatter_pa_kv_cache
from stub_torch_npu.elementwise import npu_add_rms_norm, npu_rms_norm, npu_rotary_mul, npu_swiglu
from stub_torch_npu.limits import LimitError
from stub_torch_npu.mixtures import npu_grouped_matmul, npu_moe_gating_top_k, npu_moe_init_routing_v2
from stub_torch_npu.products import npu_dynamic_quant, npu_quant_matmul, npu_weight_quant_batchmatmul

__version__ = "2.12.0"
__all__ = [
    "LimitError",
    "npu",
    "npu_add_rms_norm",
    "npu_dynamic_quant",
    "npu_fused_infer_attention_score",
    "npu_grouped_matmul",
    "npu_moe_gating_top_k",
    "npu_moe_init_routing_v2",
    "npu_quant_matmul",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_swiglu",
    "npu_weight_quant_batchmatmul",
]
