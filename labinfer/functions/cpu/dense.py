"""Calls of the compiled products and embedding lookups whose only weight arguments are the data and sizes of a packed matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum

import torch

from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.segmented_weight import SegmentedWeight

PANEL = 32
"""Outputs that are packed together (panel width)."""
PIECES = 4
"""Minimum number of work items per thread for a fused epilogue."""


class CompiledSegment(ctypes.Structure):
    """C++ struct ``Segment`` of products.h, declared for ctypes."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("lead", ctypes.c_int64),
        ("global_scale", ctypes.c_float),
        ("additions", ctypes.c_int32),
        ("in_12_bits", ctypes.c_int32),
    ]

    @classmethod
    def convert(cls, weight: PackedWeight, additions: int) -> CompiledSegment:
        """Describe ``weight``, a packed matrix in any weight layout of this folder, for C++."""
        scales = getattr(weight, "scales", None)
        return cls(
            weight=weight.data.data_ptr(),
            scales=None if scales is None else scales.data_ptr() or None,
            inputs=weight.inputs,
            lead=getattr(weight, "lead", 0),
            global_scale=getattr(weight, "global_scale", 1.0),
            additions=additions,
            in_12_bits=getattr(weight, "in_12_bits", False),
        )


class Finish(IntEnum):
    """Epilogue of a product: none, or the activation of a gated MLP. Equal to the enum in activations.h."""

    NOTHING = 0
    SILU = 1
    GELU = 2

    @classmethod
    def gate(cls, gelu: bool) -> Finish:
        return cls.GELU if gelu else cls.SILU

    def takes(self, outputs: int) -> bool:
        """Whether products with ``outputs`` outputs can use this fused epilogue. Gate and up projections must be whole panels. A
        work item is one panel of each projection, and there must be enough work items to balance the threads."""
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


def sum_products(call: Callable, x_TI: torch.Tensor, weight: SegmentedWeight, *form: int) -> torch.Tensor:
    """Sum of the products of the segments, see ``SegmentedWeight``.

    Args:
        form: arguments of ``call`` that describe the quantization, if any.
    """
    if weight.table is None:
        segments = map(CompiledSegment.convert, weight.segments, weight.additions)
        weight.table = (CompiledSegment * len(weight.segments))(*segments)
    x_TI, outputs = x_TI.contiguous(), weight.segments[0].outputs
    if weight.num_sums:
        out = x_TI.new_empty(weight.num_sums, x_TI.shape[0], outputs, dtype=torch.float32)
    else:
        out = x_TI.new_empty(x_TI.shape[0], outputs)
    call(
        x_TI.data_ptr(),
        ctypes.byref(weight.table),
        len(weight.segments),
        None if weight.num_sums else out.data_ptr(),
        out.data_ptr() if weight.num_sums else None,
        x_TI.shape[0],
        outputs,
        *form,
        torch.get_num_threads(),
    )
    return out


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
