"""Calls of the library's products and lookups that take a matrix by its data and sizes alone, in whatever form it is."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch

from labinfer.functions.packed_weight import PackedWeight

PANEL = 32
"""Outputs that are packed together."""
PIECES = 4
"""Pieces of work for each thread at least."""


class Finish(IntEnum):
    """End of a product: nothing more, or the activation of a gated MLP; activations.h has the same."""

    NOTHING = 0
    SILU = 1
    GELU = 2

    @classmethod
    def gate(cls, gelu: bool) -> Finish:
        return cls.GELU if gelu else cls.SILU

    def takes(self, outputs: int) -> bool:
        """Whether products with so many outputs are finished so: gates and ups have to be whole panels, and as a thread takes a panel
        of each at a time, there have to be enough of them for all threads to be done at about the same time."""
        return outputs % (2 * PANEL) == 0 and outputs // (2 * PANEL) >= PIECES * torch.get_num_threads()

    def empty(self, x_TI: torch.Tensor, outputs: int) -> torch.Tensor:
        """Memory for what comes out."""
        return x_TI.new_empty(x_TI.shape[0], outputs if self is Finish.NOTHING else outputs // 2)


def multiply(
    call: Callable,
    x_TI: torch.Tensor,
    weight: PackedWeight,
    bias_O: torch.Tensor | None = None,
    finish: Finish = Finish.NOTHING,
) -> torch.Tensor:
    """(T, O) in the dtype of x: x times the weight, plus the bias, which is of that dtype too.

    Args:
        finish: (T, O / 2) with an activation.
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
    """(T, D) rows of a table whose first row is that of token ``first``; zeros for tokens that it does not have."""
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
