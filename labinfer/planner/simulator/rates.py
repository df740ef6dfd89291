"""highest_rate: the highest request rate that meets the latency goals, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

LOWEST, HIGHEST = 2.0**-6, 2.0**20
"""Bounds of the search for the rate, in requests per second."""
PRECISION = 1.02
"""Ratio of the lowest failing rate to the highest passing rate at which the search ends."""


def highest_rate(is_kept: Callable[[float], bool]) -> float:
    """The highest rate that meets the goals, within ``PRECISION``; 0 if ``LOWEST`` does not meet them, infinite if ``HIGHEST``
    does.

    Args:
        is_kept: whether a rate meets the goals; no rate above a failing one may meet them.
    """
    low = high = 1.0
    if is_kept(low):
        while is_kept(high := low * 2):
            low = high
            if high >= HIGHEST:
                return math.inf
    else:
        while not is_kept(low := high / 2):
            high = low
            if low <= LOWEST:
                return 0.0
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        if is_kept(middle):
            low = middle
        else:
            high = middle
    return low
