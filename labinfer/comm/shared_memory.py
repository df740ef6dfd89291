"""SharedMemoryCommunicator: all-reduce and gathers through shared memory of one machine; other calls use MPI or gloo.

A decode step does two small all-reduces per layer. Here an all-reduce costs little more than the cache-line transfers between the
processors (``docs/decisions/0011``).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from pathlib import Path

import msgspec
import torch

from labinfer.comm.communicator import Communicator, Handle
from labinfer.comm.polling import wait_until
from labinfer.comm.segment import SegmentAddress, create_segment, open_segment
from labinfer.native import compiler

logger = logging.getLogger(__name__)

NAME, SOURCES = "comm", Path(__file__).parent
"""Name and source folder of this library, for ``compiler.load``."""
SLOT_BYTES = 512 * 1024
"""Bytes that a rank publishes at a time. Two slots of each rank fit in the cache. Larger tensors are exchanged in pieces."""
COUNTER_BYTES = 128
"""Bytes of a rank's counter; see ``shared_memory.cpp`` for the padding."""
SPIN_NANOSECONDS = 100_000
"""Time that a wait spins inside the library before Python polls; ranks with equal load arrive sooner."""


class Member(ctypes.Structure):
    """View of the segment for one rank; has the fields of the struct in ``shared_memory.cpp``."""

    _fields_ = [
        ("counters", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("arrivals", ctypes.c_uint64),
        ("operations", ctypes.c_uint64),
        ("phase", ctypes.c_int64),
    ]


class Offer(msgspec.Struct, frozen=True):
    """Message of a rank before memory is shared: the address of its segment, or the reason why it has none."""

    label: str
    address: SegmentAddress | None = None
    problem: str = ""


@dataclass(frozen=True)
class SharedSegment:
    """Memory that all ranks of a group have mapped."""

    library: ctypes.CDLL
    """Compiled functions that read and write the memory."""
    memory: mmap
    labels: list[str]
    """Name of each rank in errors."""


class SharedMemoryCommunicator(Communicator):
    """Group with a segment of shared memory, made by ``share_memory``. A timeout ends the run, as over gloo.

    Args:
        carrier: communicator of the same group over a transport.
        library: compiled ``shared_memory.cpp``.
        segment: memory mapped by all ranks; zeroed at first.
        labels: name of each rank in errors.
    """

    name = "shared memory"

    def __init__(self, carrier: Communicator, library: ctypes.CDLL, segment: mmap, labels: Sequence[str]):
        self._carrier = carrier
        self.rank, self.size, self.polls = carrier.rank, carrier.size, carrier.polls
        self.progress, self.members = carrier.progress, carrier.members
        self._labels = tuple(labels)
        memory = torch.frombuffer(segment, dtype=torch.uint8)
        counters = COUNTER_BYTES * self.size
        self._slots = memory[counters:].view(2, self.size, SLOT_BYTES)
        self._member = Member(
            counters=memory.data_ptr(),
            slots=self._slots.data_ptr(),
            rank=self.rank,
            size=self.size,
            slot_bytes=SLOT_BYTES,
        )
        self._exchange = library.exchange
        self._sums = {torch.float32: library.all_reduce_float32, torch.bfloat16: library.all_reduce_bfloat16}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float16:
            return tensor.copy_(self.all_reduce(tensor.float()))
        if tensor.dtype not in self._sums or tensor.device.type != "cpu":
            return self._carrier.all_reduce(tensor)
        if not tensor.is_contiguous():
            return tensor.copy_(self.all_reduce(tensor.contiguous()))
        begin, width = tensor.data_ptr(), tensor.itemsize
        most, count = SLOT_BYTES // width, tensor.numel()
        for done in range(0, count, most):
            self._run(self._sums[tensor.dtype], begin + done * width, min(most, count - done), "the sum")
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.device.type != "cpu":
            return self._carrier.all_gather(tensor)
        mine = tensor.contiguous()
        parts = [mine.clone() if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        self._show(mine, max(part.nbytes for part in parts), parts)
        return parts

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int], root: int = 0) -> list[torch.Tensor] | None:
        if tensor.device.type != "cpu":
            return self._carrier.gather(tensor, sizes, root)
        longest = max(size for rank, size in enumerate(sizes) if rank != root) * tensor.itemsize
        if self.rank != root:
            self._show(tensor.contiguous(), longest)
            return None
        parts = [tensor.reshape(-1) if rank == root else tensor.new_empty(size) for rank, size in enumerate(sizes)]
        self._show(tensor.new_empty(0), longest, parts)
        return parts

    def _show(self, mine: torch.Tensor, longest: int, parts: Sequence[torch.Tensor] = ()) -> None:
        """Publish this rank's tensor in its slots, and copy the tensors that other ranks publish to ``parts``.

        Args:
            longest: bytes of the largest tensor that any rank publishes.
            parts: destinations, a tensor for each rank; empty if this rank reads nothing.
        """
        shown = _bytes(mine)
        landings = [(rank, _bytes(part)) for rank, part in enumerate(parts) if rank != self.rank]
        for begin in range(0, longest, SLOT_BYTES):
            slots = self._slots[self._member.operations % 2]
            piece = shown[begin : begin + SLOT_BYTES]
            self._run(self._exchange, piece.data_ptr(), piece.numel(), "the gathering")
            for rank, landing in landings:
                here = landing[begin : begin + SLOT_BYTES]
                here.copy_(slots[rank, : here.numel()])

    def _run(self, function: Callable, address: int, count: int, what: str) -> None:
        """Call ``function`` of the library, and wait for each rank that it reports as late, until it reports none."""
        late = function(self._member, address, count, SPIN_NANOSECONDS)
        while late >= 0:
            late = self._wait_for(late, partial(function, self._member, address, count, 0), what)

    def _wait_for(self, peer: int, again: Callable[[], int], what: str) -> int:
        """Yield or sleep until ``peer`` arrives. Returns the next late rank; -1 if all have arrived.

        Args:
            again: repeats the call that reported ``peer``; returns the late rank, or -1.
        """
        late = peer

        def has_arrived() -> bool:
            nonlocal late
            self._carrier.advance()  # progresses this rank's messages, which the late rank may wait for
            late = again()
            return late != peer

        wait_until(has_arrived, f"the part of {self._labels[peer]} in {what} over {self.members}", self.progress)
        return late

    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        return self._carrier.isend(tensor, dest)

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        return self._carrier.irecv(tensor, source)

    def advance(self) -> None:
        self._carrier.advance()

    def close(self) -> None:
        self._carrier.close()

    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        return self._carrier.split(groups, backends)


def share_memory(carrier: Communicator, on_progress: compiler.OnProgress = lambda done, total: None) -> Communicator:
    """Give a group a segment of shared memory; collective.

    Args:
        on_progress: called with the progress of a compilation, on the first rank.

    Returns:
        The group with shared memory; ``carrier`` if its ranks cannot share memory (the first rank logs why).
    """
    if carrier.size == 1:
        return carrier
    shared = share_segment(
        carrier,
        carrier.size * (COUNTER_BYTES + 2 * SLOT_BYTES),
        lambda: load_library(on_progress) if carrier.rank == 0 else load_library(),
    )
    if isinstance(shared, SharedSegment):
        return SharedMemoryCommunicator(carrier, shared.library, shared.memory, shared.labels)
    if carrier.rank == 0:
        logger.warning(
            "%s share no memory (%s); all-reduce falls back to %s, which is slower",
            carrier.members,
            shared,
            carrier.name,
        )
    return carrier


def share_segment(comm: Communicator, size: int, load: Callable[[], ctypes.CDLL]) -> SharedSegment | str:
    """Map one segment on all ranks of a group; collective.

    Args:
        size: bytes; zeroed at first.
        load: returns the compiled library. Called on the first rank first, so that the others find it compiled.

    Returns:
        The segment, or the first rank's reason why it cannot be shared.
    """
    library = memory = descriptor = None
    offer = Offer(comm.progress.label)
    if comm.rank == 0:
        try:
            library = load()
            memory, descriptor, address = create_segment(size)
            offer = Offer(offer.label, address)
        except (compiler.NoCompiler, OSError) as error:
            offer = Offer(offer.label, problem=str(error))
    offers = _gather_offers(comm, offer)
    if comm.rank > 0 and offers[0].address is not None:
        try:
            library = load()
            memory = open_segment(offers[0].address)
        except (compiler.NoCompiler, OSError) as error:
            offer = Offer(offer.label, problem=str(error))
    answers = _gather_offers(comm, offer)
    if descriptor is not None:
        os.close(descriptor)
    problems = [f"{answer.label}: {answer.problem}" for answer in answers if answer.problem]
    return problems[0] if problems else SharedSegment(library, memory, [answer.label for answer in answers])


def load_library(on_progress: compiler.OnProgress = lambda done, total: None) -> ctypes.CDLL:
    """Load the functions of ``shared_memory.cpp``; see ``compiler.load``.

    Raises:
        NoCompiler: no C++ compiler is available, or it failed.
    """
    library = compiler.load(NAME, SOURCES, on_progress=on_progress)
    for function in (library.exchange, library.all_reduce_float32, library.all_reduce_bfloat16):
        function.argtypes = [ctypes.POINTER(Member), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        function.restype = ctypes.c_int64
    return library


def _gather_offers(carrier: Communicator, offer: Offer) -> list[Offer]:
    with carrier.progress.without_limit():  # another rank may be compiling
        encoded = carrier.all_gather_bytes(msgspec.msgpack.encode(offer))
    return [msgspec.msgpack.decode(data, type=Offer) for data in encoded]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
