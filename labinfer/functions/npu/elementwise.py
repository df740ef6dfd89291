"""Norms, SwiGLU, rotary embedding and cache writes by operators of torch_npu.

Sizes and dtypes that an operator does not support are passed to the reference. The limits are those of the operators' pages in
docs/zh/custom_APIs/torch_npu of Ascend/op-plugin.
"""

from __future__ import annotations

from types import ModuleType

import torch

from labinfer.functions.attention_batch import Angles
from labinfer.functions.attention_heads import HeadNorms, QKVHeads
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.reference import attention, elementwise

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of cache writes, attention and quantized products."""
MAX_ROTATED, MAX_HEADS = 895, 999
"""Maximum number of rotated dimensions and of heads of ``npu_rotary_mul``."""


class NpuElementwise:
    """Norms, activations and rotary embedding by the operators of ``ops``.

    Args:
        ops: module of the operators, torch_npu.
    """

    def __init__(self, ops: ModuleType):
        self._ops = ops

    def add_rms_norm(
        self, hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden + delta`` and its RMSNorm; see ``AddRMSNorm``."""
        if not hidden_TD.numel():
            return elementwise.add_rms_norm(hidden_TD, delta_TD, weight_D, eps)
        if delta_TD is not None and weight_D.dtype == hidden_TD.dtype:
            normed_TD, _, sum_TD = self._ops.npu_add_rms_norm(hidden_TD, delta_TD, weight_D, epsilon=eps)
            return sum_TD, normed_TD
        sum_TD = hidden_TD if delta_TD is None else hidden_TD + delta_TD
        return sum_TD, self._rms_norm(sum_TD, weight_D, eps)

    def _rms_norm(self, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return self._ops.npu_rms_norm(x, weight_D, epsilon=eps)[0]

    def silu_and_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``; gate and up are the halves of a row: (T, 2F) → (T, F)."""
        if not gate_up_TF.numel():
            return elementwise.silu_and_mul(gate_up_TF)
        return self._ops.npu_swiglu(gate_up_TF.contiguous(), dim=-1)

    def rotate_and_write(
        self,
        qkv_THP: torch.Tensor,
        cache: LayerCache,
        slots_T: torch.Tensor,
        angles: Angles | None,
        heads: QKVHeads,
    ) -> torch.Tensor:
        """Apply rope and QK norms to queries and keys, and write keys and values to the KV cache; see ``RotateAndWrite``."""
        num_kv, norms = heads.num_kv, heads.norms
        if not qkv_THP.numel():
            return attention.rotate_and_write(qkv_THP, cache, slots_T, angles, heads)
        q_THP, k_TKP, v_TKP = qkv_THP.split([qkv_THP.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
        if norms is not None and not norms.after_rotation:
            q_THP, k_TKP = self._norm_heads(q_THP, k_TKP, norms)
        if angles is not None:
            q_THP, k_TKP = (self._rotate(x, angles, interleaved=heads.interleaved) for x in (q_THP, k_TKP))
        if norms is not None and norms.after_rotation:
            q_THP, k_TKP = self._norm_heads(q_THP, k_TKP, norms)
        if norms is not None and norms.values and num_kv:
            v_TKP = self._rms_norm(v_TKP, v_TKP.new_ones(v_TKP.shape[-1]), norms.eps)
        if num_kv:
            self._write(k_TKP, v_TKP, cache, slots_T)
        return q_THP.contiguous()

    def _norm_heads(
        self, q_THP: torch.Tensor, k_TKP: torch.Tensor, norms: HeadNorms
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """QK norms of query heads and, if there are any, of key heads."""
        k_TKP = self._rms_norm(k_TKP, norms.k_P, norms.eps) if k_TKP.numel() else k_TKP
        return self._rms_norm(q_THP, norms.q_P, norms.eps), k_TKP

    def _rotate(self, x_THP: torch.Tensor, angles: Angles, *, interleaved: bool) -> torch.Tensor:
        cos_TR, sin_TR = angles
        rotated = cos_TR.shape[-1]
        if not x_THP.numel() or rotated > MAX_ROTATED or x_THP.shape[1] > MAX_HEADS:
            return elementwise.rotary(x_THP, cos_TR, sin_TR, interleaved)
        mode = "interleave" if interleaved else "half"
        # In the layout TND the angles are (T, 1, D).
        turned_THR = self._ops.npu_rotary_mul(
            x_THP[..., :rotated].contiguous(), cos_TR.unsqueeze(1), sin_TR.unsqueeze(1), rotary_mode=mode
        )
        return turned_THR if rotated == x_THP.shape[-1] else torch.cat((turned_THR, x_THP[..., rotated:]), dim=-1)

    def _write(self, k_TKP: torch.Tensor, v_TKP: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor) -> None:
        """Store keys and values in the slots of their tokens. The operator is used for 16-bit dtypes only: the A2 and A3 series support no other dtypes."""
        pools = (cache.k, cache.v)
        if (
            cache.is_tiled
            or k_TKP.dtype not in HALF_DTYPES
            or any(pool.dtype != k_TKP.dtype or not pool.is_contiguous() for pool in pools)
        ):
            attention.write_kv(k_TKP, v_TKP, cache, slots_T)
            return
        self._ops.npu_scatter_pa_kv_cache(k_TKP.contiguous(), v_TKP.contiguous(), *pools, slots_T, cache_mode="Norm")
