"""Ceilings: what this machine's memory and arithmetic allow at most, measured on a rank's threads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BYTES = 256 * 2**20
"""What is read: more than the caches hold."""
ROUNDS = 1 << 18
REPEATS = 30
"""Short and many, since other processes may disturb some of them."""


@dataclass(frozen=True)
class Ceilings:
    """Per second, on so many threads together; 0 for an instruction that the processor does not have."""

    threads: int
    memory: float
    """Bytes read."""
    float32: float
    """Multiplications and additions."""
    dot: float
    """The same in dot products of bfloat16."""
    int8: float
    """The same in dot products of 8 bits."""

    def arithmetic(self, quantization: str) -> float:
        """The most that products with weights held that way can reach."""
        wide = max(self.float32, self.dot)
        return wide if quantization == "none" else max(wide, self.int8)


def measure_ceilings(library: ctypes.CDLL, num_bytes: int = BYTES, rounds: int = ROUNDS) -> Ceilings:
    """The best of some runs of each."""
    threads = torch.get_num_threads()
    data = torch.ones(num_bytes, dtype=torch.uint8)

    def of(name: str) -> float:
        return _best_rate(lambda: getattr(library, name)(rounds, threads)) if hasattr(library, name) else 0.0

    memory = _best_rate(lambda: library.ceiling_memory(data.data_ptr(), num_bytes, threads))
    return Ceilings(threads, memory, of("ceiling_float32"), of("ceiling_dot"), of("ceiling_int8"))


def _best_rate(work: Callable[[], int]) -> float:
    best = 0.0
    for _ in range(REPEATS):
        begin = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - begin))
    return best
