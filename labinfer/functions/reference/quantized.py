"""Matrix products of weights in 8, 5 or 4 bits with activations in 8 bits.

A weight is an integer code times a scale. In int8 each output has a scale. In int4 each group of inputs of an output
has a scale (as in GPTQ: Frantar et al. 2022, arXiv:2210.17323), stored in float16 times a power of two per matrix (see
``choose_global_scale``). Weights that a checkpoint has quantized may also have groups in 8 bits, and per group a zero point,
which is subtracted first, or a minimum, which is added last; or their codes index a lookup table. Activations are
quantized dynamically to 8 bits with a scale per row (Dettmers et al. 2022, arXiv:2208.07339), so that kernels multiply
integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from labinfer.functions.packed_weight import POWERS_OF_TWO, TABLES, QuantizedWeight
from labinfer.weights.codes import Codes

LARGEST_8 = 127
LOWEST_4, HIGHEST_4 = -8, 7
OUTPUTS = 4096
"""Rows of a matrix that are dequantized to float32 at a time."""
STEPS_4 = tuple(-8.0 + 0.25 * step for step in range(9))
"""Multiples of the scale to which a group's largest weight may be mapped; each gives a candidate scale for the
group."""


def quantize_int8(weight_OI: torch.Tensor) -> QuantizedWeight:
    """Symmetric int8 quantization to -127 … 127 with a scale per output; each output's largest weight becomes ±127."""
    data_OI, scales_O1 = _rounded(weight_OI.float())
    outputs, inputs = weight_OI.shape
    return QuantizedWeight(
        data=data_OI.to(torch.int8),
        scales=scales_O1.squeeze(1),
        outputs=outputs,
        inputs=inputs,
        dtype=weight_OI.dtype,
    )


def quantize_int4(weight_OI: torch.Tensor, group: int) -> QuantizedWeight:
    """Int4 quantization to -8 … 7. Of the candidate scales (``STEPS_4``, in float16), each group takes the one with the
    least squared error.

    A byte holds the codes of two adjacent inputs. Inputs are zero-padded to whole groups.
    """
    outputs, inputs = weight_OI.shape
    global_scale = choose_global_scale(weight_OI)
    wide = F.pad(weight_OI.float(), (0, -inputs % group)).view(outputs, -1, group)
    extreme = wide.gather(2, wide.abs().argmax(2, keepdim=True))
    best = torch.zeros_like(extreme)
    least = torch.full_like(extreme, float("inf"))
    for step in STEPS_4[:1] if weight_OI.is_meta else STEPS_4:  # only sizes matter on the meta device
        scale = (extreme / step / global_scale).half().float() * global_scale
        error = (wide - scale * _whole(wide, scale)).square().sum(2, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    unsigned = (_whole(wide, best) - LOWEST_4).to(torch.uint8).view(outputs, -1)
    data = unsigned[:, 0::2] | unsigned[:, 1::2] << 4
    return QuantizedWeight(
        data=data,
        scales=(best / global_scale).squeeze(2).half(),
        outputs=outputs,
        inputs=inputs,
        dtype=weight_OI.dtype,
        bits=4,
        group=group,
        global_scale=global_scale,
    )


def pack_codes(codes: Codes, dtype: torch.dtype) -> QuantizedWeight:
    """Pack the quantized weights of a checkpoint without changing their values: 4-bit codes of two adjacent inputs
    share a byte; 8-bit codes without groups get the layout of ``quantize_int8``."""
    form, minima = codes.form, None
    data = codes.words.contiguous().view(torch.uint8)
    if not form.group:
        data = _compute(lambda data_OI: data_OI ^ form.middle, data[:, : codes.num_inputs]).view(torch.int8)
        scales, global_scale = codes.scales.squeeze(1), 1.0
    elif form.table in POWERS_OF_TWO:
        scales, global_scale = (
            codes.scales.to(torch.bfloat16),
            1.0,
        )  # exact: bfloat16 represents every power-of-two scale of the table
    else:
        global_scale = shared_global_scale(codes.scales, codes.minima)
        scales = _compute(lambda scales_OG: scales_OG / global_scale, codes.scales).half()
        if codes.minima is not None:
            minima = _compute(lambda minima_OG: minima_OG / global_scale, codes.minima).half()
    return QuantizedWeight(
        data=data,
        scales=scales,
        zeros=codes.zeros,
        minima=minima,
        table=form.table,
        values=torch.tensor(TABLES[form.table], dtype=torch.float32, device=data.device) if form.table else None,
        outputs=codes.num_outputs,
        inputs=codes.num_inputs,
        dtype=dtype,
        bits=form.bits,
        group=form.group,
        lead=codes.lead,
        global_scale=global_scale,
    )


def choose_global_scale(weight_OI: torch.Tensor) -> float:
    """Power of two by which int4 scales are divided before they are stored in float16. The largest quotient is between
    2**14 and 2**15.

    Scales down to 2**-28 of the largest thus keep float16's full precision, whatever the range of the matrix's dtype.
    """
    return 1.0 if weight_OI.is_meta else _global_scale(_peak(weight_OI) / -STEPS_4[-1])


def _compute(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Apply an element-wise function; skipped on the meta device, where torch would import sympy for it."""
    return tensor if tensor.is_meta else function(tensor)


def shared_global_scale(scales_OG: torch.Tensor, minima_OG: torch.Tensor | None = None) -> float:
    """Power of two by which quantization scales (and minima, if any) are divided to fit float16; see ``choose_global_scale``."""
    if scales_OG.is_meta:
        return 1.0
    return _global_scale(max(_peak(scales_OG), 0.0 if minima_OG is None else _peak(minima_OG)))


def dequantize(weight: QuantizedWeight, outputs: slice | torch.Tensor = slice(None)) -> torch.Tensor:
    """The dequantized matrix, or the rows ``outputs`` of it (a slice or indices): (O, I) float32."""
    data, scales = weight.data[outputs], weight.scales[outputs].float() * weight.global_scale
    if not weight.group:
        return data.float() * scales.unsqueeze(1)
    if weight.bits == 4:
        data = torch.stack([data & 15, data >> 4], dim=2)
    if weight.bits == 5:
        lower, words = data.view(len(data), -1, 5, 4).split([1, 4], dim=2)
        lower = lower >> torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device).view(4, 1) & 3
        data = torch.stack([words & 31, words >> 5 << 2 | lower], dim=3)
    whole = data.view(len(scales), -1, weight.group).float()
    zeros = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros[outputs].float().unsqueeze(2)
    if weight.values is not None:
        whole, zeros = weight.values[whole.int()], 0
    if weight.minima is None:
        wide = (whole - zeros) * scales.unsqueeze(2)
    else:
        wide = whole * scales.unsqueeze(2) + weight.minima[outputs].float().unsqueeze(2) * weight.global_scale
    return wide.view(len(scales), -1)[:, weight.lead : weight.lead + weight.inputs]


def linear(x_TI: torch.Tensor, weight: QuantizedWeight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """``quantized(x) @ dequantized(weight).T + bias``: (T, I) → (T, O) in x's dtype."""
    data_TI, scales_T1 = _rounded(x_TI.float())
    blocks = [F.linear(data_TI, dequantize(weight, slice(o, o + OUTPUTS))) for o in range(0, weight.outputs, OUTPUTS)]
    out_TO = torch.cat(blocks, dim=1) * scales_T1
    return (out_TO if bias_O is None else out_TO + bias_O.float()).to(x_TI.dtype)


def embedding(token_ids_T: torch.Tensor, table: QuantizedWeight, first: int) -> torch.Tensor:
    """Rows of a vocabulary slice that begins at id ``first``: (T,) → (T, D); ids outside the slice give zeros."""
    local_T = token_ids_T - first
    outside_T = (local_T < 0) | (local_T >= table.outputs)
    local_T = local_T.clamp(0, table.outputs - 1)
    return dequantize(table, local_T).to(table.dtype).masked_fill_(outside_T.unsqueeze(1), 0)


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to ±127: integers as floats, and each row's scale. Rounds the exact product, as an FMA does."""
    peaks = rows.abs().amax(1, keepdim=True)
    factors = (
        torch.full_like(peaks, LARGEST_8) / peaks
    )  # torch computes number / tensor as number * reciprocal, which rounds twice
    factors = factors.masked_fill(~(peaks > 0), 0.0)  # the scale is 0 or NaN: rows of zeros, or with NaN
    if rows.device.type == "cpu":
        return (rows.double() * factors.double()).round().float(), peaks / LARGEST_8
    return rounded_product(rows, factors), peaks / LARGEST_8  # not every accelerator has float64


def rounded_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The exact products of float32 tensors, rounded to integers, ties to even, without float64.

    The float32 product rounds to another integer than the exact one only if it is a tie. Then its rounding error decides, which
    Dekker's algorithm computes exactly (1971, Numerische Mathematik 18, 224-242). Elements above 2**115 or products below 2**-100 round as
    float32 does.
    """
    product = x * y
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    error = x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)
    rounded = product.round()
    is_decided = ((product - rounded).abs() == 0.5) & (error.abs() > 0)
    return torch.where(is_decided, product.floor() + (error > 0), rounded)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float32 tensors of 12 significant bits whose sum is ``x`` (Veltkamp's split)."""
    large = x * 4097.0
    high = large - (large - x)
    return high, x - high


def _peak(values: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    low, high = values.aminmax()
    return max(-low.item(), high.item())


def _global_scale(peak: float) -> float:
    """Power of two by which a largest scale of ``peak`` is divided, to a quotient between 2**14 and 2**15."""
    return math.ldexp(1.0, math.frexp(peak)[1] - 15) if 0.0 < peak < math.inf else 1.0


def _whole(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    safe = scales.masked_fill(scales == 0, 1.0)
    return (values / safe).round().clamp(LOWEST_4, HIGHEST_4)
