"""Doorbells: what wakes a rank that sleeps until others of its machine have sent it something, and says whose cores are free.

A rank that polls keeps its core. Where another stage's rank may compute on that core meanwhile, it has to sleep, and to be woken
within microseconds (``docs/decisions/0041``).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch

from labinfer.comm.communicator import Communicator
from labinfer.comm.shared_memory import NAME, SOURCES, SharedSegment, share_segment
from labinfer.native import compiler

logger = logging.getLogger(__name__)

BELL_BYTES = 128
"""Bytes of a rank's bell; ``doorbells.cpp`` has the same."""
IDLE_AT = 8
"""Byte of a bell at which a word stands that is not 0 while its rank waits."""


class Doorbells:
    """Bells of some ranks of one machine, as one of them sees them.

    Args:
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


def hang_doorbells(
    comm: Communicator,
    ranks: Sequence[int],
    rank: int,
    on_progress: compiler.OnProgress = lambda done, total: None,
) -> Doorbells | None:
    """Share memory for the bells of all ranks of a group, which are on one machine; collective. None where they cannot.

    Args:
        ranks: their numbers in the launch; ``rank`` is this one's.
        on_progress: hears of what is compiled, on the first rank.
    """
    shared = share_segment(
        comm,
        comm.size * BELL_BYTES,
        lambda: _load_library(on_progress) if comm.rank == 0 else _load_library(),
    )
    if not isinstance(shared, SharedSegment):
        if comm.rank == 0:
            logger.info("%s share no memory (%s): their messages go over %s", comm.members, shared, comm.name)
        return None
    return Doorbells(shared.library, torch.frombuffer(shared.memory, dtype=torch.uint8), ranks, rank)


def _load_library(on_progress: compiler.OnProgress = lambda done, total: None) -> ctypes.CDLL:
    """The functions of ``doorbells.cpp``.

    Raises:
        NoCompiler: they are not compiled, and cannot be.
    """
    library = compiler.load(NAME, SOURCES, on_progress=on_progress)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    arguments = {"bell_ring": [pointer], "bell_rings": [pointer], "bell_sleep": [pointer, size, size]}
    for name, types in (arguments | {"bell_set_idle": [pointer, ctypes.c_int]}).items():
        getattr(library, name).argtypes = types
        getattr(library, name).restype = size if name == "bell_rings" else None
    return library
