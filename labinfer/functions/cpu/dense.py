"""Calls of those products and lookups of the library that need only the data and the sizes of a packed matrix."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch

from labinfer.functions.packed_weight import PackedWeight

PANEL = 32
"""Outputs that are packed together (panel width)."""
PIECES = 4
"""Minimum number of work items per thread for a fused epilogue."""


class Finish(IntEnum):
    """Epilogue of a product: none, or the activation of a gated MLP. Equal to the enum in activations.h."""

    NOTHING = 0
    SILU = 1
    GELU = 2

    @classmethod
    def gate(cls, gelu: bool) -> Finish:
        return cls.GELU if gelu else cls.SILU

    def takes(self, outputs: int) -> bool:
        """Whether products with ``outputs`` outputs can use this fused epilogue. Gate and up projections must be whole panels. A work item is
        a panel of each, and there must be enough of them to balance the threads."""
        return outputs % (2 * PANEL) == 0 and outputs // (2 * PANEL) >= PIECES * torch.get_num_threads()

    def empty(self, x_TI: torch.Tensor, outputs: int) -> torch.Tensor:
        """Uninitialized output tensor of a product with this epilogue."""
        return x_TI.new_empty(x_TI.shape[0], outputs if self is Finish.NOTHING else outputs // 2)


def multiply(
    call: Callable,
    x_TI: torch.Tensor,
    weight: PackedWeight,
    bias_O: torch.Tensor | None = None,
    finish: Finish = Finish.NOTHING,
) -> torch.Tensor:
    """``x @ weight.T + bias``, (T, O), in the dtype of x, which the bias has, too.

    Args:
        finish: fused epilogue; (T, O / 2) with an activation.
    """
    x_TI = x_TI.contiguous()
    out_TO = finish.empty(x_TI, weight.outputs)
    call(
        x_TI.data_ptr(),
        weight.data.data_ptr(),
        None if bias_O is None else bias_O.data_ptr(),
        out_TO.data_ptr(),
        x_TI.shape[0],
        weight.outputs,
        weight.inputs,
        finish,
        torch.get_num_threads(),
    )
    return out_TO


def look_up(call: Callable, token_ids_T: torch.Tensor, table: PackedWeight, first: int) -> torch.Tensor:
    """(T, D) rows of a table whose first row belongs to token id ``first``; zeros for ids outside of the table."""
    out_TD = torch.empty(token_ids_T.shape[0], table.inputs, dtype=table.dtype)
    call(
        token_ids_T.data_ptr(),
        table.data.data_ptr(),
        out_TD.data_ptr(),
        token_ids_T.shape[0],
        table.outputs,
        table.inputs,
        first,
        torch.get_num_threads(),
    )
    return out_TD
