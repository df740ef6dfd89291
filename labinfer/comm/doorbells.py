"""Doorbells: what wakes a rank that sleeps until others of its machine have sent it something.

A rank that polls keeps its core. Where another stage's rank may compute on that core meanwhile, it has to sleep, and to be woken
within microseconds (``docs/decisions/0041``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

BELL_BYTES = 128
"""Bytes of a rank's bell; ``doorbells.cpp`` has the same."""


class Doorbells:
    """Bells of some ranks of one machine, as one of them sees them.

    Args:
        library: see ``shared_memory.load_library``.
        memory: mapped by all; zero bytes at first.
        ranks: their numbers in the launch, in the order of their bells.
        own: this rank's.
    """

    def __init__(self, library: ctypes.CDLL, memory: torch.Tensor, ranks: Sequence[int], own: int):
        self._library, self._memory = library, memory
        self._bells = {rank: memory.data_ptr() + index * BELL_BYTES for index, rank in enumerate(ranks)}
        self._own = self._bells[own]

    def ring(self, rank: int) -> None:
        """Wake a rank, if it is one of these."""
        if (bell := self._bells.get(rank)) is not None:
            self._library.bell_ring(bell)

    def __contains__(self, rank: int) -> bool:
        """Whether a rank has a bell, and so rings this one's when it has sent something."""
        return rank in self._bells

    def rings(self) -> int:
        """Number of times that this rank's bell has rung."""
        return self._library.bell_rings(self._own)

    def sleep(self, rings: int, seconds: float) -> None:
        """Sleep until the bell has rung more often than so many times, at most so long."""
        self._library.bell_sleep(self._own, rings, int(seconds * 1e9))
