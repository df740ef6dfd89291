"""Logits of which only the largest matters, by way of a copy of the head in 4 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labinfer.functions.head_preview import GROUP, SIGMAS, HeadPreview
from labinfer.functions.packed_weight import PackedWeight, QuantizedWeight
from labinfer.functions.protocols import Embedding, Linear
from labinfer.functions.reference import quantized

ROWS, PANEL = 8192, 32
"""Outputs whose rounding is measured at a time, and those that compiled functions read together."""


def make_preview(
    weight_OI: torch.Tensor, *, round_head: Callable[[torch.Tensor], QuantizedWeight] | None = None
) -> HeadPreview:
    """The copy as the functions below read it.

    Args:
        round_head: packs the head where that rounds it: the copy then stands for what was rounded.
    """
    head = weight_OI if round_head is None else round_head(weight_OI)
    return measure_preview(head, quantized.quantize_int4(weight_OI, GROUP), quantized.embedding)


def measure_preview(head: torch.Tensor | QuantizedWeight, packed: QuantizedWeight, embedding: Embedding) -> HeadPreview:
    """A preview of what was packed, with how far every output is from that of the head.

    Args:
        embedding: looks up rows of ``packed``, and of a head that is rounded itself.
    """

    def float_rows(matrix: torch.Tensor | QuantizedWeight, begin: int, end: int) -> torch.Tensor:
        if isinstance(matrix, torch.Tensor):
            return matrix[begin:end].float()
        wide = QuantizedWeight(**{name: getattr(matrix, name) for name in matrix.__slots__} | {"dtype": torch.float32})
        return embedding(torch.arange(begin, end, device=matrix.device), wide, 0)

    outputs = packed.outputs
    spread_2O = torch.zeros(2, -(-outputs // PANEL) * PANEL, device=packed.device)
    for begin in range(0, 0 if packed.data.is_meta else outputs, ROWS):
        end = min(begin + ROWS, outputs)
        rounded_OI = float_rows(packed, begin, end)
        both_2OI = torch.stack([float_rows(head, begin, end) - rounded_OI, rounded_OI])
        spread_2O[:, begin:end] = both_2OI.square().mean(2).sqrt()
    return HeadPreview(
        codes=packed.data,
        scales=packed.scales,
        spread_2O=spread_2O,
        outputs=outputs,
        inputs=packed.inputs,
        unit=packed.unit,
    )


def largest_logits(linear: Linear) -> Callable[[torch.Tensor, PackedWeight, HeadPreview], torch.Tensor]:
    """``LargestLogits`` for weights that this product reads.

    Approximate logits have errors |x| times the root mean square of what rounding took from an output's weights, and for inputs in 8
    bits what that took from x times the root mean square of the weights: standard deviations, as both are sums of many small errors.
    Every output that may be the largest within ``SIGMAS`` of these gets its exact logit. Where one of them is further off than that,
    nothing is left out.
    """

    def call(x_TI: torch.Tensor, weight: PackedWeight, preview: HeadPreview) -> torch.Tensor:
        exact_TO = linear(x_TI, weight)
        approximate_TO, error_TO = approximate_logits(x_TI, preview)
        least_T1 = (approximate_TO - error_TO).amax(1, keepdim=True)
        eps = torch.finfo(x_TI.dtype).eps
        most_TO = approximate_TO + error_TO
        candidates_TO = most_TO + eps * most_TO.abs() >= least_T1  # rounded, it may be as large
        rounding_TO = eps * exact_TO.float().abs()
        is_off_TO = candidates_TO & ((exact_TO.float() - approximate_TO).abs() > error_TO + rounding_TO)
        is_trusted_T1 = ~is_off_TO.any(1, keepdim=True) & least_T1.isfinite()
        return exact_TO.masked_fill(~candidates_TO & is_trusted_T1, float("-inf"))

    return call


def approximate_logits(x_TI: torch.Tensor, preview: HeadPreview) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits by the copy, and how far off they may be; (T, O) float32 both."""
    weight = QuantizedWeight(
        data=preview.codes,
        scales=preview.scales,
        outputs=preview.outputs,
        inputs=preview.inputs,
        dtype=torch.float32,
        bits=4,
        group=GROUP,
        unit=preview.unit,
    )
    x_TI = x_TI.float()
    rounded_TI = quantized.round_rows(x_TI)
    lost_T1, size_T1 = (rows.norm(dim=1, keepdim=True) for rows in (x_TI - rounded_TI, x_TI))
    taken_O, rounded_O = preview.spread_2O[:, : preview.outputs]
    return quantized.linear(x_TI, weight), SIGMAS * (size_T1 * taken_O + lost_T1 * rounded_O)
