"""The compiled scan and gated norm of the Mamba-2 mixer; its causal convolution is in ``delta_rule.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.cpu.delta_rule import batch_addresses
from labinfer.functions.cpu.library import Library
from labinfer.functions.mamba_heads import MambaHeads


class CpuMamba:
    """Each method implements the function of equal name; ``family_protocols`` documents the arguments.

    Args:
        library: see ``library.load``.
    """

    dtypes = (torch.bfloat16, torch.float32, torch.float16)

    def __init__(self, library: Library):
        self._library = library

    def calls(self) -> dict[str, Callable]:
        """Function name → method of this object that implements the function."""
        return {name: getattr(self, name) for name in ("selective_scan", "gated_group_norm")}

    def selective_scan(
        self,
        xbc_TC: torch.Tensor,
        dt_TH: torch.Tensor,
        state: torch.Tensor,
        batch: AttentionBatch,
        heads: MambaHeads,
    ) -> torch.Tensor:
        _, num_heads, state_size, head_size = state.shape
        out_THP = xbc_TC.new_empty(xbc_TC.shape[0], num_heads, head_size)
        self._library.find_typed("selective_scan", xbc_TC.dtype)(
            xbc_TC.data_ptr(),
            dt_TH.data_ptr(),
            heads.rate_H.data_ptr(),
            heads.bias_H.data_ptr(),
            heads.skip_H.data_ptr(),
            heads.groups_H.data_ptr(),
            state.data_ptr(),
            *batch_addresses(batch),
            out_THP.data_ptr(),
            dt_TH.stride(0),
            len(batch.context_lens),
            num_heads,
            (xbc_TC.shape[1] - num_heads * head_size) // (2 * state_size),
            state_size,
            head_size,
            heads.min_dt,
            heads.max_dt,
            torch.get_num_threads(),
        )
        return out_THP

    def gated_group_norm(
        self, x_TD: torch.Tensor, gate_TD: torch.Tensor, weight_D: torch.Tensor, num_groups: int, eps: float
    ) -> torch.Tensor:
        out_TD = torch.empty_like(x_TD)
        rows, size = x_TD.shape
        self._library.find_typed("gated_group_norm", x_TD.dtype)(
            x_TD.data_ptr(),
            gate_TD.data_ptr(),
            weight_D.data_ptr(),
            out_TD.data_ptr(),
            gate_TD.stride(0),
            rows,
            num_groups,
            size // num_groups,
            eps,
            torch.get_num_threads(),
        )
        return out_TD
