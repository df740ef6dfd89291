"""Matrix products with quantized weights and with experts' weights in Triton; weights are read once, in their stored format.

Weights are converted to the inputs' dtype in registers, in which int8 values are exact. Unlike in the CPU functions, inputs are not
quantized to int8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from labinfer.functions.cuda.attention import count_splits
from labinfer.functions.packed_weight import TABLES, DenseWeight, PackedWeight, QuantizedWeight
from labinfer.functions.reference import quantized

OUTPUTS = 64
"""Outputs of a product that one Triton program computes."""
INPUTS = 128
"""Maximum number of inputs per tile."""
MAX_ROWS = 64
"""Maximum number of rows per program."""
CODED_ROWS = 128
"""Maximum number of rows for which quantized weights are multiplied directly; for more rows they are dequantized first."""
MAX_SPLITS = 8
"""Maximum number of splits of a product's inputs (split-K), each with its own programs."""
COLUMNS = 256
"""Outputs per program of the kernel that adds up the splits of a product."""
WIDE_BYTES = 64 << 20
"""Maximum bytes of dequantized weights; larger matrices are dequantized some rows at a time."""


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Rows of a product, grouped by expert."""

    expert_G: torch.Tensor
    """Expert of each group of rows, int64; -1 for none."""
    begin_G: torch.Tensor
    end_G: torch.Tensor
    """Range of each group's rows in ``order_P``."""
    order_P: torch.Tensor
    """Indices of the (token, expert) pairs in group order; int64."""
    rows_each: int
    """Maximum number of rows per group."""


def can_multiply(weight: PackedWeight) -> bool:
    """Whether the kernel supports the format of ``weight``."""
    if isinstance(weight, DenseWeight):
        return True
    in_groups = weight.group >= 32 and weight.group & (weight.group - 1) == 0
    return not weight.lead and (weight.bits == 4 and in_groups or weight.bits == 8 and (in_groups or not weight.group))


class CudaProducts:
    """Matrix products with quantized weights on one GPU.

    Args:
        device: GPU of the weights.
    """

    def __init__(self, device: torch.device):
        self._tables = {
            name: torch.tensor(numbers, dtype=torch.float32, device=device) for name, numbers in TABLES.items() if name
        }

    def linear(self, x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ dequantized(weight).T + bias``: (T, I) → (T, O) in x's dtype."""
        if not can_multiply(weight):
            return quantized.linear(x_TI, weight, bias_O)
        if x_TI.shape[0] <= CODED_ROWS:
            return self.multiply(x_TI.contiguous(), weight, bias_O)
        rows_each = max(OUTPUTS, WIDE_BYTES // (weight.inputs * x_TI.itemsize))
        parts = [
            F.linear(x_TI, quantized.dequantize(weight, slice(begin, begin + rows_each)).to(x_TI.dtype))
            for begin in range(0, weight.outputs, rows_each)
        ]
        out_TO = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out_TO if bias_O is None else out_TO + bias_O

    def multiply(
        self,
        x_TI: torch.Tensor,
        weight: PackedWeight,
        bias_O: torch.Tensor | None = None,
        *,
        rows: ExpertRows | None = None,
        pairs_each: int = 1,
        global_scales_E: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply the rows of x by a matrix, (T, O); or, with ``rows``, the row of each (token, expert) pair by the expert's matrix,
        (T × pairs, O). Output rows of pairs in a group of expert -1 (see ``ExpertRows``) are not written: their values are undefined.

        Args:
            x_TI: contiguous.
            weight: matrix for which ``can_multiply`` is true; with ``rows`` its tensors have a leading expert dimension.
            pairs_each: number of pairs per row of ``x``.
            global_scales_E: ``global_scale`` of each expert's matrix, float32; None without experts, or if weights are not quantized.
        """
        num_rows = x_TI.shape[0] * pairs_each
        out_TO = x_TI.new_empty(num_rows, weight.outputs)
        if not num_rows or not weight.outputs:
            return out_TO
        codes = weight if isinstance(weight, QuantizedWeight) else None
        group = 0 if codes is None else codes.group
        tile = min(group or INPUTS, INPUTS if x_TI.itemsize == 2 else 32)
        rows_each = min(MAX_ROWS, max(16, triton.next_power_of_2(num_rows))) if rows is None else rows.rows_each
        row_blocks = triton.cdiv(num_rows, rows_each) if rows is None else rows.expert_G.shape[0]
        blocks = triton.cdiv(weight.outputs, OUTPUTS)
        splits = count_splits(blocks * row_blocks, min(MAX_SPLITS, triton.cdiv(weight.inputs, tile)))
        parts = out_TO
        if splits > 1:
            parts = torch.empty(splits, num_rows, weight.outputs, dtype=torch.float32, device=x_TI.device)
        tensors = [
            *(
                (None,) * 4
                if codes is None
                else (codes.scales, codes.zeros, codes.minima, self._tables.get(codes.table))
            ),
            *(global_scales_E, bias_O),
            *((None,) * 4 if rows is None else (rows.expert_G, rows.begin_G, rows.end_G, rows.order_P)),
        ]
        _multiply[(blocks, row_blocks, splits)](
            parts,
            x_TI,
            weight.data,
            *(
                out_TO if tensor is None else tensor for tensor in tensors
            ),  # placeholders for missing tensors, which the kernel does not read
            num_rows,
            weight.outputs,
            weight.inputs,
            1.0 if codes is None else codes.global_scale,
            BITS=0 if codes is None else codes.bits,
            GROUP=group,
            PAIRS=pairs_each,
            BY_EXPERT=rows is not None,
            HAS_ZEROS=codes is not None and codes.zeros is not None,
            HAS_MINIMA=codes is not None and codes.minima is not None,
            HAS_TABLE=codes is not None and bool(codes.table),
            HAS_BIAS=bias_O is not None and splits == 1,
            ROWS=max(16, rows_each),
            OUTPUTS=OUTPUTS,
            TILE=tile,
            SPLITS=splits,
            num_warps=4,
            num_stages=3 if x_TI.itemsize == 2 else 2,
        )
        if splits > 1:
            _add_parts[(num_rows, triton.cdiv(weight.outputs, COLUMNS))](
                out_TO,
                parts,
                out_TO if bias_O is None else bias_O,
                num_rows,
                weight.outputs,
                HAS_BIAS=bias_O is not None,
                SPLITS=splits,
                COLUMNS=COLUMNS,
                num_warps=2,
            )
        return out_TO


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    out,
    x,
    data,
    scales,
    zeros,
    minima,
    table,
    global_scales,
    bias,
    group_experts,
    group_begins,
    group_ends,
    order,
    num_rows,
    outputs,
    inputs,
    global_scale,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # one program per block of rows, OUTPUTS outputs and split of the inputs
    block, split = tl.program_id(1), tl.program_id(2)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    matrix_row = output.to(tl.int64)
    if BY_EXPERT:
        expert = tl.load(group_experts + block)
        if expert < 0:
            return
        place = tl.load(group_begins + block) + tl.arange(0, ROWS)
        is_row = place < tl.load(group_ends + block)
        row = tl.load(order + place, mask=is_row, other=0).to(tl.int32)
        matrix_row = expert * outputs + output
        if BITS > 0:
            global_scale = tl.load(global_scales + expert)
    num_groups = 1
    if GROUP > 0:
        num_groups = tl.cdiv(inputs, GROUP)
    x_row = x + (row // PAIRS).to(tl.int64)[:, None] * inputs
    tiles_each = tl.cdiv(tl.cdiv(inputs, TILE), SPLITS)
    begin = split * tiles_each * TILE
    end = tl.minimum(begin + tiles_each * TILE, inputs)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(begin, end, TILE):
        if BITS == 4:
            pair = tl.arange(0, TILE // 2)
            is_low, is_high = first + 2 * pair < inputs, first + 2 * pair + 1 < inputs
            x_low = tl.load(x_row + first + 2 * pair[None, :], mask=is_row[:, None] & is_low[None, :], other=0.0)
            x_high = tl.load(x_row + first + 2 * pair[None, :] + 1, mask=is_row[:, None] & is_high[None, :], other=0.0)
            width = num_groups * (GROUP // 2)
            codes = tl.load(
                data + matrix_row[None, :] * width + (first // 2 + pair)[:, None],
                mask=is_output[None, :] & is_low[:, None],
                other=0,
            )
            low, high = (codes & 15).to(tl.int32), (codes >> 4).to(tl.int32)
            if HAS_TABLE:
                low, high = tl.load(table + low), tl.load(table + high)
            else:
                middle = tl.full([1, OUTPUTS], 8, tl.int32)
                if HAS_ZEROS:
                    middle = tl.load(zeros + matrix_row * num_groups + first // GROUP, mask=is_output, other=0).to(
                        tl.int32
                    )[None, :]
                if HAS_MINIMA:
                    middle = tl.full([1, OUTPUTS], 0, tl.int32)
                low, high = low - middle, high - middle
            products = tl.dot(x_low, low.to(x_low.dtype), input_precision="ieee")
            products += tl.dot(x_high, high.to(x_low.dtype), input_precision="ieee")
            x_sum = tl.sum(x_low.to(tl.float32), 1) + tl.sum(x_high.to(tl.float32), 1)
        else:
            column = first + tl.arange(0, TILE)
            is_column = column < inputs
            x_tile = tl.load(x_row + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
            width = inputs
            if GROUP > 0:
                width = num_groups * GROUP
            w = tl.load(
                data + matrix_row[None, :] * width + column[:, None],
                mask=is_output[None, :] & is_column[:, None],
                other=0,
            )
            if BITS == 8 and GROUP > 0:
                w = w.to(tl.int32)
                if HAS_ZEROS:
                    w -= tl.load(zeros + matrix_row * num_groups + first // GROUP, mask=is_output, other=0).to(
                        tl.int32
                    )[None, :]
                elif not HAS_MINIMA:
                    w -= 128
            products = tl.dot(x_tile, w.to(x_tile.dtype), input_precision="ieee")
            x_sum = tl.sum(x_tile.to(tl.float32), 1)
        if GROUP > 0:
            at = matrix_row * num_groups + first // GROUP
            scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32) * global_scale
            products = products * scale[None, :]
            if HAS_MINIMA:
                least = tl.load(minima + at, mask=is_output, other=0.0).to(tl.float32) * global_scale
                products += x_sum[:, None] * least[None, :]
        sums += products
    if BITS == 8 and GROUP == 0:
        sums = sums * (tl.load(scales + matrix_row, mask=is_output, other=0.0).to(tl.float32) * global_scale)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place_out = (split * num_rows + row).to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + place_out, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts(
    out, parts, bias, num_rows, outputs, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):  # one program per COLUMNS outputs of a row
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = output < outputs
    sums = tl.zeros([COLUMNS], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(parts + (split * num_rows + row) * outputs + output, mask=is_output, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, sums.to(out.dtype.element_ty), mask=is_output)
