"""CPU time as a multiple of a fixed piece of Python, so that limits hold on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def effort(work: Callable[[], Result]) -> tuple[Result, float]:
    """What a call returns, and how many yardsticks it took: some 30 ms each on one machine of 2.1 GHz."""
    begin = time.process_time()
    result = work()
    seconds = time.process_time() - begin
    return result, seconds / min(_yardstick() for _ in range(3))


def _yardstick() -> float:
    begin, table, total = time.process_time(), {(n, n + 1): n / 2 for n in range(256)}, 0.0
    for number in range(100_000):
        key = number & 255
        total = max(total, table[key, key + 1] * total + 0.5)
        total /= 2
    return time.process_time() - begin
