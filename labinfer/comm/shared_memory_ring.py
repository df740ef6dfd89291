"""RingCommunicator: small messages between ranks of one machine through ring buffers in shared memory; other messages use MPI or gloo.

A step sends a few small messages (plan, activations, tokens). A socket would wake two threads for each, on cores that compute
(``docs/decisions/0076``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from labinfer.comm.communicator import Communicator, Finished, Handle
from labinfer.comm.polling import (
    LONGEST_SLEEP,
    SHORTEST_SLEEP,
    YIELD_SECONDS,
    YIELD_SECONDS_OVERSUBSCRIBED,
    wait_until,
)
from labinfer.comm.progress import Progress
from labinfer.comm.shared_memory import NAME, SOURCES, SharedSegment, share_segment
from labinfer.comm.wire import WireError
from labinfer.native import compiler

logger = logging.getLogger(__name__)

LARGEST_BYTES = 128 * 1024
"""Largest message that goes through a ring. Both ends know a message's size and so choose the same way."""
ROOM_BYTES = 1024 * 1024
"""Capacity of a ring for unread messages in bytes; a sender waits while it is full."""
RING_BYTES = 256 + ROOM_BYTES
"""Bytes of a ring with its counters; see ``shared_memory_ring.cpp``."""
EVENT_BYTES = 128
"""Bytes of an event; see ``shared_memory_ring.cpp``."""
LONGEST_SLEEP_WITH_EVENT = 0.1
"""Longest sleep in seconds of a wait for a transport that progresses by itself. The event normally ends the sleep long before."""
SHORTEST_SLEEP_OF_SHARED_CORE = 500e-6
"""Seconds. Shortest sleep with core sharing: each wake-up takes time from the rank that computes on this core."""
YIELD_SECONDS_AFTER_EVENT = 0.0002
"""Seconds of yielding after an event. A large message needs several polls but notifies once."""


class WakeupEvents:
    """One wake-up event for each rank of a machine.

    Args:
        library: compiled ``shared_memory_ring.cpp``.
        memory: memory of the events, zeroed at first; kept alive by this object.
        ranks: ranks of this machine, in the order of their events.
        own: rank of this process.
    """

    def __init__(self, library: ctypes.CDLL, memory: torch.Tensor, ranks: Sequence[int], own: int):
        self._library, self._memory = library, memory
        self.addresses = {rank: memory.data_ptr() + index * EVENT_BYTES for index, rank in enumerate(ranks)}
        self._own = self.addresses[own]

    def notify(self, rank: int) -> None:
        """Wake a rank of this machine; no effect for other ranks."""
        if (event := self.addresses.get(rank)) is not None:
            self._library.event_notify(event)

    def count(self) -> int:
        """Number of notifications that this rank has received."""
        return self._library.event_count(self._own)

    def sleep(self, count: int, seconds: float) -> None:
        """Sleep until the number of notifications differs from ``count``, at most ``seconds``."""
        self._library.event_sleep(self._own, count, int(seconds * 1e9))

    def wait_until(
        self,
        done: Callable[[], bool],
        what: str,
        progress: Progress,
        timeout: float | None,
        longest_sleep: float,
    ) -> None:
        """``polling.wait_until`` with sleeps that a notification ends. With core sharing it sleeps without yielding
        first."""
        limit = progress.timeout if timeout is None else timeout
        if progress.on_wait is not None:
            sleep, yields_until = SHORTEST_SLEEP_OF_SHARED_CORE, 0.0
        else:
            sleep = SHORTEST_SLEEP
            yields_until = YIELD_SECONDS_OVERSUBSCRIBED if progress.oversubscribed else YIELD_SECONDS
        last, begin = self.count(), time.monotonic()
        with progress.waiting(what):
            while True:
                count = self.count()  # before ``done``, so that a later notification is not missed
                if done():
                    return
                waited = time.monotonic() - begin
                if waited > limit:
                    raise progress.timed_out(what, limit)
                if count != last:
                    last, yields_until = count, max(yields_until, waited + YIELD_SECONDS_AFTER_EVENT)
                if waited < yields_until:
                    os.sched_yield()
                else:
                    self.sleep(count, sleep)
                    sleep = min(sleep * 1.1, longest_sleep)


class RingCommunicator(Communicator):
    """Communicator whose messages between ranks of one machine go through ring buffers; made by ``share_rings``.

    Args:
        carrier: communicator of the same group over a transport.
        library: compiled ``shared_memory_ring.cpp``.
        memory: one ring for each ordered pair of this machine's ranks (writer-major); zeroed at first.
        ranks: group ranks of this machine.
        events: wake-up events of ``ranks``.
        readers: ring readers of all groups of this rank. Those of this group are appended.
    """

    name = "shared memory"

    def __init__(
        self,
        carrier: Communicator,
        library: ctypes.CDLL,
        memory: torch.Tensor,
        ranks: Sequence[int],
        *,
        events: WakeupEvents,
        readers: list[RingReader],
    ):
        self._carrier, self._library, self._memory, self.events = carrier, library, memory, events
        self.rank, self.size, self.polls = carrier.rank, carrier.size, carrier.polls
        self.progress, self.members = carrier.progress, carrier.members
        rings = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, RING_BYTES)
        own, count = ranks.index(self.rank), len(ranks)
        others = [(index, rank) for index, rank in enumerate(ranks) if rank != self.rank]
        self._written = {rank: rings[own * count + index] for index, rank in others}
        self._readers = {
            rank: RingReader(carrier, library, memory, rings[index * count + own], source=rank, events=events)
            for index, rank in others
        }
        readers += self._readers.values()
        self._all_readers = readers

    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        if tensor.nbytes <= LARGEST_BYTES and (ring := self._written.get(dest)) is not None:
            return self._write(ring, b"", tensor, dest)
        handle = self._carrier.isend(tensor, dest)
        self._notify(dest)
        return handle

    def isend_after(self, header: bytes, tensor: torch.Tensor, dests: Sequence[int]) -> list[Handle]:
        rings = self._written if len(header) + tensor.nbytes <= LARGEST_BYTES else {}
        carried = [dest for dest in dests if dest not in rings]
        sends = dict(zip(carried, self._carrier.isend_after(header, tensor, carried), strict=True)) if carried else {}
        for dest in carried:
            self._notify(dest)
        return [sends[dest] if dest in sends else self._write(rings[dest], header, tensor, dest) for dest in dests]

    def _notify(self, dest: int) -> None:
        """Wake a rank of this machine for a message over ``carrier``, if ``carrier`` is polled."""
        if self.polls:
            self.events.notify(dest)

    def _write(self, ring: int, header: bytes, tensor: torch.Tensor, dest: int) -> Handle:
        assert tensor.is_contiguous(), "a message is sent as it is in memory"
        event = self.events.addresses[dest]
        message = (ring, ROOM_BYTES, event, header, len(header), tensor.data_ptr(), tensor.nbytes)
        if not self._library.ring_write(*message):
            self._wait_for_room(message, dest)
        return Finished()

    def _wait_for_room(self, message: tuple, dest: int) -> None:
        def fits() -> bool:
            for reader in self._all_readers:  # two ranks must not wait for each other's ring space
                reader.read()
            self._carrier.advance()
            return self._library.ring_write(*message)

        wait_until(fits, f"room for messages at rank {dest}", self.progress)

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        reader = self._readers.get(source)
        if reader is not None and tensor.nbytes <= LARGEST_BYTES:
            return reader.receive(tensor)
        handle = self._carrier.irecv(tensor, source)
        return handle if reader is None or not self.polls else CarriedReceive(handle, self)

    def advance(self) -> None:
        self._carrier.advance()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._carrier.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._carrier.all_gather(tensor)

    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        return self._carrier.split(groups, backends)

    def close(self) -> None:
        self._carrier.close()


class RingReader:
    """Reading end of a ring, and a queue of receives that wait for its messages.

    Args:
        memory: memory of the ring at ``address``; kept alive by this object.
    """

    def __init__(
        self,
        carrier: Communicator,
        library: ctypes.CDLL,
        memory: torch.Tensor,
        address: int,
        *,
        source: int,
        events: WakeupEvents,
    ):
        self.carrier, self.events = carrier, events
        self._library, self._memory, self._address, self._source = library, memory, address, source
        self._waiting: deque[RingReceive] = deque()

    def receive(self, tensor: torch.Tensor) -> RingReceive:
        """Post a receive into ``tensor``."""
        receive = RingReceive(self, tensor)
        self._waiting.append(receive)
        return receive

    def read(self) -> None:
        """Copy arrived messages into the waiting receives, oldest first.

        Raises:
            WireError: a message differs in size from its receive.
        """
        while self._waiting:
            tensor = self._waiting[0].tensor
            size = self._library.ring_read(self._address, ROOM_BYTES, tensor.data_ptr(), tensor.nbytes)
            if size < 0:
                return
            if size != tensor.nbytes:
                raise WireError(f"rank {self._source} sent {size} bytes where {tensor.nbytes} were expected")
            self._waiting.popleft().is_here = True


class RingReceive(Handle):
    """Handle of a receive from a ring."""

    def __init__(self, reader: RingReader, tensor: torch.Tensor):
        self._reader, self.tensor = reader, tensor
        self.is_here = False

    def done(self) -> bool:
        if not self.is_here:
            self._reader.read()
            if not self.is_here:
                self._reader.carrier.advance()
        return self.is_here

    def wait(self, what: str, timeout: float | None = None) -> None:
        if not self.done():
            carrier = self._reader.carrier
            longest = LONGEST_SLEEP if carrier.polls else LONGEST_SLEEP_WITH_EVENT
            self._reader.events.wait_until(self.done, what, carrier.progress, timeout, longest)


class CarriedReceive(Handle):
    """Handle of a receive over a polled transport. The sender, a rank of this machine, notifies this rank of its message."""

    def __init__(self, handle: Handle, comm: RingCommunicator):
        self._handle, self._comm = handle, comm

    def done(self) -> bool:
        return self._handle.done()

    def wait(self, what: str, timeout: float | None = None) -> None:
        if not self.done():
            self._comm.events.wait_until(self.done, what, self._comm.progress, timeout, LONGEST_SLEEP)


def share_rings(
    machine: Communicator,
    carriers: Sequence[Communicator],
    ranks: Sequence[int],
    on_progress: compiler.OnProgress = lambda done, total: None,
) -> list[Communicator]:
    """Add rings to groups with host memory, for messages between ranks of one machine; collective over the machine.

    Args:
        machine: communicator of the machine's ranks.
        carriers: communicators of groups that all have equal ranks.
        ranks: ranks of the machine in ``carriers``, in the order of ``machine``.
        on_progress: called with the progress of a compilation, on the first rank.

    Returns:
        The groups with rings; ``carriers`` if the ranks cannot share memory.
    """
    if machine.size == 1 or not carriers:
        return list(carriers)
    size = machine.size**2 * RING_BYTES
    shared = share_segment(
        machine,
        len(carriers) * size + machine.size * EVENT_BYTES,
        lambda: _load_library(on_progress) if machine.rank == 0 else _load_library(),
    )
    if not isinstance(shared, SharedSegment):
        if machine.rank == 0:
            logger.info("%s share no memory (%s); messages fall back to %s", machine.members, shared, machine.name)
        return list(carriers)
    memory = torch.frombuffer(shared.memory, dtype=torch.uint8)
    parts = memory[: len(carriers) * size].view(len(carriers), size)
    events = WakeupEvents(shared.library, memory[parts.nbytes :], ranks, ranks[machine.rank])
    readers: list[RingReader] = []
    return [
        RingCommunicator(carrier, shared.library, part, ranks, events=events, readers=readers)
        for carrier, part in zip(carriers, parts, strict=True)
    ]


def _load_library(on_progress: compiler.OnProgress = lambda done, total: None) -> ctypes.CDLL:
    """Load the functions of ``shared_memory_ring.cpp``; see ``compiler.load``.

    Raises:
        NoCompiler: the library is not compiled, and no C++ compiler is available.
    """
    library = compiler.load(NAME, SOURCES, on_progress=on_progress)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.ring_write.argtypes = [pointer, size, pointer, ctypes.c_char_p, size, pointer, size]
    library.ring_read.argtypes = [pointer, size, pointer, size]
    library.event_notify.argtypes = library.event_count.argtypes = [pointer]
    library.event_sleep.argtypes = [pointer, size, size]
    library.event_notify.restype = library.event_sleep.restype = None
    library.ring_write.restype = library.ring_read.restype = library.event_count.restype = size
    return library
