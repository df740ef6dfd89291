"""``SegmentedWeight``: matrices of adjacent inputs, whose products are added in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labinfer.functions.packed_weight import PackedWeight


@dataclass(kw_only=True)
class SegmentedWeight:
    """Matrices of adjacent ranges of inputs, for the compiled implementations of ``Linear`` in place of one packed weight.

    The products are added in float32 as on a stack: each product is pushed, and then its number of ``additions`` says how often the two
    topmost sums are replaced by their sum.
    """

    segments: tuple[PackedWeight, ...]
    additions: tuple[int, ...]
    """Additions after the product of each segment."""
    num_sums: int = 0
    """Size of the first dimension of a float32 result (sums, T, O), which begins with the sums that are left on the stack. 0 if one sum is
    left, and rounded to the dtype of the activations: (T, O)."""
    table: Any = None
    """Description of the segments for C++, which the implementation keeps from call to call; None before the first call."""
