"""Roofline limits of a CPU, measured with the loops of ``roofline.cpp`` on a rank's threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from labinfer.functions.cpu.library import Library
from labinfer.functions.roofline_limits import RooflineLimits

BYTES = 256 * 2**20
"""Size of the buffer that is read: larger than the caches."""
ROUNDS = 1 << 18
REPEATS = 30
"""Number of short measurements: other processes may disturb some of them."""


def measure_roofline(library: Library, num_bytes: int = BYTES, rounds: int = ROUNDS) -> RooflineLimits:
    """Best rate of ``REPEATS`` runs of each loop."""
    threads = torch.get_num_threads()
    data = torch.ones(num_bytes, dtype=torch.uint8)

    def arithmetic(*names: str) -> float:
        present = [getattr(library, name) for name in names if hasattr(library, name)]
        return max((_best_rate(partial(loop, rounds, threads)) for loop in present), default=0.0)

    memory = _best_rate(lambda: library.roofline_memory(data.data_ptr(), num_bytes, threads))
    return RooflineLimits(
        threads,
        memory,
        arithmetic("roofline_float32"),
        arithmetic("roofline_dot", "roofline_amx"),
        arithmetic("roofline_int8", "roofline_int8_amx"),
    )


def _best_rate(work: Callable[[], int]) -> float:
    best = 0.0
    for _ in range(REPEATS):
        begin = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - begin))
    return best
