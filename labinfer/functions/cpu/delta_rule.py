"""The compiled gated delta rule, with its causal convolution and gated norm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.cpu.library import Library
from labinfer.functions.delta_heads import DeltaHeads


class CpuDeltaRule:
    """Each method implements the function of equal name; ``family_protocols`` documents the arguments.

    Args:
        library: see ``library.load``.
    """

    dtypes = (torch.bfloat16, torch.float32, torch.float16)

    def __init__(self, library: Library):
        self._library = library

    def calls(self) -> dict[str, Callable]:
        """Function name → method of this object that implements the function."""
        return {name: getattr(self, name) for name in ("causal_conv", "delta_rule", "gated_norm")}

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_WC: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        bias_C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out_TC = x_TC.new_empty(x_TC.shape)
        self._library.find_typed("causal_conv", x_TC.dtype)(
            x_TC.data_ptr(),
            weight_WC.data_ptr(),
            None if bias_C is None else bias_C.data_ptr(),
            state.data_ptr(),
            *batch_addresses(batch),
            out_TC.data_ptr(),
            len(batch.context_lens),
            x_TC.stride(0),
            x_TC.shape[1],
            weight_WC.shape[0],
            torch.get_num_threads(),
        )
        return out_TC

    def delta_rule(
        self,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        heads: DeltaHeads,
    ) -> torch.Tensor:
        _, num_heads, key_size, value_size = state.shape
        out_THP = qkv_TC.new_empty(qkv_TC.shape[0], num_heads, value_size)
        self._library.find_typed("delta_rule", qkv_TC.dtype)(
            qkv_TC.data_ptr(),
            gates_TG.data_ptr(),
            heads.rate_H.data_ptr(),
            heads.bias_H.data_ptr(),
            heads.key_heads_H.data_ptr(),
            state.data_ptr(),
            *batch_addresses(batch),
            out_THP.data_ptr(),
            len(batch.context_lens),
            num_heads,
            (qkv_TC.shape[1] - num_heads * value_size) // (2 * key_size),
            key_size,
            value_size,
            torch.get_num_threads(),
        )
        return out_THP

    def gated_norm(
        self, x_THP: torch.Tensor, gate_THP: torch.Tensor, weight_P: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out_THP = torch.empty_like(x_THP)
        self._library.find_typed("gated_norm", x_THP.dtype)(
            x_THP.data_ptr(),
            gate_THP.data_ptr(),
            weight_P.data_ptr(),
            out_THP.data_ptr(),
            gate_THP.stride(0),
            *x_THP.shape,
            eps,
            torch.get_num_threads(),
        )
        return out_THP


def batch_addresses(batch: AttentionBatch) -> tuple[int, ...]:
    """Addresses of ``batch``'s row pointers, context lengths and state slots."""
    return batch.row_ptr_B.data_ptr(), batch.context_lens_B.data_ptr(), batch.state_slots_B.data_ptr()
