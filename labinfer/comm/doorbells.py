"""Doorbells: what wakes a rank that sleeps until others of its machine have sent it something, and says whose cores are free.

A rank that polls keeps its core. Where another stage's rank may compute on that core meanwhile, it has to sleep, and to be woken
within microseconds (``docs/decisions/0041``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

BELL_BYTES = 128
"""Bytes of a rank's bell; ``doorbells.cpp`` has the same."""
IDLE_AT = 8
"""Byte of a bell at which a word stands that is not 0 while its rank waits."""


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
        self._is_kept = False

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

    def set_idle(self, idle: bool) -> None:
        """Say whether this rank waits, so that others may compute on its cores."""
        self._library.bell_set_idle(self._own, idle)

    def idle_words(self) -> dict[int, int]:
        """By rank, the address of a word that is not 0 while it waits. The bells' memory is never given back then: guests of a team may look
        at its words at any time."""
        if not self._is_kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
            self._is_kept = True
        return {rank: bell + IDLE_AT for rank, bell in self._bells.items()}
