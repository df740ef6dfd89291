"""Messages between the ranks of one machine through memory that they share; all others go over the transport.

A step has a few small ones: its plan, activations, tokens. Over a socket each wakes two threads, on cores that are computing
(``docs/decisions/0076``).
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Sequence

import torch

from labinfer.comm.communicator import Communicator, Finished, Handle
from labinfer.comm.polling import LONGEST_SLEEP, wait_until
from labinfer.comm.shared_memory import NAME, SOURCES, SharedSegment, share_segment
from labinfer.comm.wire import WireError
from labinfer.native import compiler

logger = logging.getLogger(__name__)

LARGEST_BYTES = 128 * 1024
"""Longer messages go over the transport. Both ends know a message's size, and so which way it takes."""
RING_BYTES = 1024 * 1024
"""Bytes that one rank can have sent another before that takes them; who sends more waits."""
BOX_BYTES = 256 + RING_BYTES
"""With the counters of ``mailboxes.cpp``."""
LONGEST_SLEEP_WITH_BELL = 0.1
"""Seconds, over a transport that goes on by itself. The bell ends a sleep long before."""


class MailboxCommunicator(Communicator):
    """A group of which some ranks share a machine; made by ``share_mailboxes``.

    Args:
        carrier: the transport of the same group.
        library: the compiled ``mailboxes.cpp``.
        memory: a box for each pair of this machine's ranks, by sender and then receiver; zero bytes at first.
        ranks: those of this machine, by their numbers in the group, which are those of their doorbells too.
        inboxes: those of all groups of this rank that share memory, to which this one's are added.
    """

    name = "shared memory"

    def __init__(
        self,
        carrier: Communicator,
        library: ctypes.CDLL,
        memory: torch.Tensor,
        ranks: Sequence[int],
        inboxes: list[Inbox],
    ):
        self._carrier, self._library, self._memory = carrier, library, memory
        self.rank, self.size, self.polls = carrier.rank, carrier.size, carrier.polls
        self.progress, self.members = carrier.progress, carrier.members
        boxes = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, BOX_BYTES)
        own, count = ranks.index(self.rank), len(ranks)
        others = [(index, rank) for index, rank in enumerate(ranks) if rank != self.rank]
        self._outboxes = {rank: boxes[own * count + index] for index, rank in others}
        self._inboxes = {
            rank: Inbox(carrier, library, memory, boxes[index * count + own], rank) for index, rank in others
        }

        inboxes += self._inboxes.values()
        self._all_inboxes = inboxes

    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        box = self._box(dest, tensor.nbytes)
        return self._carrier.isend(tensor, dest) if box is None else self._post(box, b"", tensor, dest)

    def isend_after(self, header: bytes, tensor: torch.Tensor, dests: Sequence[int]) -> list[Handle]:
        boxes = {dest: self._box(dest, len(header) + tensor.nbytes) for dest in dests}
        carried = [dest for dest, box in boxes.items() if box is None]
        sends = dict(zip(carried, self._carrier.isend_after(header, tensor, carried), strict=True)) if carried else {}
        return [sends[dest] if box is None else self._post(box, header, tensor, dest) for dest, box in boxes.items()]

    def _box(self, dest: int, size: int) -> int | None:
        """Address of the box for a message of so many bytes; None where the transport carries it."""
        return self._outboxes.get(dest) if size <= LARGEST_BYTES else None

    def _post(self, box: int, header: bytes, tensor: torch.Tensor, dest: int) -> Handle:
        assert tensor.is_contiguous(), "a message is sent as it is in memory"
        message = (box, RING_BYTES, header, len(header), tensor.data_ptr(), tensor.nbytes)
        if not self._library.box_post(*message):
            self._wait_for_room(message, dest)
        if self.progress.doorbells is not None:
            self.progress.doorbells.ring(dest)
        return Finished()

    def _wait_for_room(self, message: tuple, dest: int) -> None:
        def fits() -> bool:
            for inbox in self._all_inboxes:  # or two ranks could wait for room at each other
                inbox.take()
            self._carrier.advance()
            return self._library.box_post(*message)

        wait_until(fits, f"room for messages at rank {dest}", self.progress)

    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        inbox = self._inboxes.get(source)
        if inbox is None or tensor.nbytes > LARGEST_BYTES:
            return self._carrier.irecv(tensor, source)
        return inbox.receive(tensor)

    def advance(self) -> None:
        self._carrier.advance()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._carrier.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._carrier.all_gather(tensor)

    def split(self, groups: Sequence[Sequence[int]], devices: Sequence[str] = ()) -> Communicator:
        return self._carrier.split(groups, devices)

    def close(self) -> None:
        self._carrier.close()


class Inbox:
    """The box in which one rank's messages come, and the receives that wait for them, in their order.

    Args:
        memory: in which the box is, at ``address``; kept as long as there are receives.
    """

    def __init__(self, carrier: Communicator, library: ctypes.CDLL, memory: torch.Tensor, address: int, source: int):
        self.carrier = carrier
        self._library, self._memory, self._address, self._source = library, memory, address, source
        self._waiting: deque[BoxReceive] = deque()

    def receive(self, tensor: torch.Tensor) -> BoxReceive:
        """Begin to receive into a tensor."""
        receive = BoxReceive(self, tensor)
        self._waiting.append(receive)
        return receive

    def take(self) -> None:
        """Copy messages that are here into the receives that wait, oldest first.

        Raises:
            WireError: a message has another size than its receive.
        """
        while self._waiting:
            tensor = self._waiting[0].tensor
            size = self._library.box_take(self._address, RING_BYTES, tensor.data_ptr(), tensor.nbytes)
            if size < 0:
                return
            if size != tensor.nbytes:
                raise WireError(f"rank {self._source} sent {size} bytes where {tensor.nbytes} were expected")
            self._waiting.popleft().is_here = True


class BoxReceive(Handle):
    """A message on its way into a tensor."""

    def __init__(self, inbox: Inbox, tensor: torch.Tensor):
        self._inbox, self.tensor = inbox, tensor
        self.is_here = False

    def done(self) -> bool:
        if not self.is_here:
            self._inbox.take()
            if not self.is_here:
                self._inbox.carrier.advance()
        return self.is_here

    def wait(self, what: str, timeout: float | None = None) -> None:
        if not self.done():
            carrier = self._inbox.carrier
            longest = LONGEST_SLEEP if carrier.polls else LONGEST_SLEEP_WITH_BELL
            wait_until(self.done, what, carrier.progress, timeout, rings=True, longest_sleep=longest)


def share_mailboxes(
    machine: Communicator,
    carriers: Sequence[Communicator],
    ranks: Sequence[int],
) -> list[Communicator]:
    """Give groups boxes for the messages between the ranks of one machine, all of them with host memory; collective over these.

    Args:
        machine: the ranks of the machine.
        carriers: the groups, each of the same ranks.
        ranks: those of the machine, by their numbers in these groups, in the order of ``machine``.

    Returns:
        The groups with boxes; ``carriers`` themselves where the ranks cannot share memory.
    """
    if machine.size == 1 or not carriers:
        return list(carriers)
    size = machine.size**2 * BOX_BYTES
    shared = share_segment(machine, len(carriers) * size, _load_library)
    if not isinstance(shared, SharedSegment):
        if machine.rank == 0:
            logger.info("%s share no memory (%s): their messages go over %s", machine.members, shared, machine.name)
        return list(carriers)
    memory = torch.frombuffer(shared.memory, dtype=torch.uint8).view(len(carriers), size)
    inboxes: list[Inbox] = []
    return [
        MailboxCommunicator(carrier, shared.library, part, ranks, inboxes)
        for carrier, part in zip(carriers, memory, strict=True)
    ]


def _load_library() -> ctypes.CDLL:
    """The functions of ``mailboxes.cpp``; see ``compiler.load``.

    Raises:
        NoCompiler: they are not compiled, and cannot be.
    """
    library = compiler.load(NAME, SOURCES)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.box_post.argtypes = [pointer, size, ctypes.c_char_p, size, pointer, size]
    library.box_take.argtypes = [pointer, size, pointer, size]
    library.box_post.restype = library.box_take.restype = size
    return library
