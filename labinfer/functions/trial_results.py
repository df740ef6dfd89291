"""``TrialResult``: a result of a trial, and its comparison with the result of the reference implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOLERANCES = {4: 1e-4, 2: 0.02, 1: 0.02}
"""Maximum error, relative to the largest magnitude in the reference's result, by bytes per element."""
MAX_GAIN = 0.005
"""Maximum relative difference of the scale of a 16-bit result, which rounding errors hardly change, from the reference's."""
LEAST_SCALED = 64
"""Minimum number of elements of a result whose scale is compared."""


@dataclass(frozen=True)
class TrialResult:
    """A tensor that a call returns, or the contents of memory that it reads and writes."""

    values: torch.Tensor
    tolerance: float
    is_memory: bool = False


def dtype_tolerance(dtype: torch.dtype) -> float:
    """Maximum error of results in ``dtype``, see ``TOLERANCES``; 0 for indices."""
    return 0.0 if dtype in (torch.int64, torch.int32) else TOLERANCES[dtype.itemsize]


def first_difference(results: Sequence[TrialResult], expected: Sequence[TrialResult], tolerance: float | None) -> str:
    """The first difference of the results from the reference's; empty if all are within the tolerance."""
    if len(results) != len(expected):
        return f"gives {len(results)} tensors, not {len(expected)}"
    pairs = zip(results, expected, strict=True)
    return next(filter(None, (_difference(result, right, tolerance) for result, right in pairs)), "")


def _difference(result: TrialResult, right: TrialResult, tolerance: float | None) -> str:
    """Difference of a result from the reference's, as the predicate of a sentence; empty if within the tolerance."""
    got, expected = result.values, right.values
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"gives {tuple(got.shape)} in {got.dtype}, not {tuple(expected.shape)} in {expected.dtype}"
    if (got.isnan() & ~expected.isnan()).any():
        return "gives NaN where the reference gives numbers; it may read memory that no token has written"
    if (expected.isnan() & ~got.isnan()).any():
        return "writes to memory of other tokens"
    if not right.tolerance:
        return "" if torch.equal(got, expected) else "gives other numbers than the reference"
    got, expected = got.double().nan_to_num(), expected.double().nan_to_num()
    error = float((got - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    limit = tolerance or right.tolerance
    place = "leaves other numbers in memory than" if result.is_memory else "differs from"
    if error > limit:
        return f"{place} the reference by {error:.2g} times its largest number, more than {limit:g}"
    gain = float((got * expected).sum() / expected.square().sum().clamp_min(1e-300)) - 1
    if tolerance is None and expected.numel() >= LEAST_SCALED and abs(gain) > MAX_GAIN and expected.any():
        return f"{place} the reference by a factor of {1 + gain:.3f}"
    return ""
