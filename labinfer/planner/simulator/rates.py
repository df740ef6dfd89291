"""The highest rate of requests at which goals are kept, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

LOWEST, HIGHEST = 2.0**-6, 2.0**20
"""Requests a second; outside of these nothing is tried."""
PRECISION = 1.02
"""Factor between the highest rate that was kept and the lowest that was not."""


def highest_rate(is_kept: Callable[[float], bool]) -> float:
    """The highest rate, to within ``PRECISION``; 0 where not even ``LOWEST`` is kept, infinite where ``HIGHEST`` is.

    Args:
        is_kept: whether a rate is, which below any that is kept others are.
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
