"""Communicator: a group of ranks that exchange tensors, the same on every transport; Handle: one transfer.

Three transports: ``MpiCommunicator``, ``TorchCommunicator`` and ``LocalCommunicator`` (threads of one process; also the
communicator of a group of one). ``SharedMemoryCommunicator`` and ``RingCommunicator`` wrap any of them: sums, gathers and small
messages between ranks of one machine then go through shared memory.
``docs/operations.md`` says which is used when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from labinfer.comm.progress import Progress


class Handle(ABC):
    """A transfer that has begun. Its buffer belongs to the transport until ``wait`` returns or ``done`` is true."""

    @abstractmethod
    def wait(self, what: str, timeout: float | None = None) -> None:
        """Sleep, yielding the core, until the transfer is complete.

        Args:
            what: what is awaited and from whom, for the error and the watchdog: ``activations from rank 1``.
            timeout: seconds; None takes the group's limit, ``inf`` waits as long as it takes.

        Raises:
            WaitTimeout: the limit passed.
            PeerLost: the peer is gone.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether the transfer is complete; never blocks. May stay False on transports that can only wait."""


class Communicator(ABC):
    """A group of ranks. Every collective must be called by all of them, in the same order."""

    rank: int
    """This process's number in the group."""
    size: int
    """Ranks in the group."""
    name: str
    """Transport, for tables: ``mpi``, ``gloo``, ``nccl``, ``local``, ``shared memory``."""
    progress: Progress
    members: str
    """The group's ranks by their numbers in the world, for errors: ``ranks 0-3``."""
    polls: bool = False
    """Whether transfers go on only while this process calls the transport: in a wait of it, or in ``advance``."""

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        """Begin to send a contiguous tensor. Messages between a pair arrive in the order they were sent. Waits where the receiver has
        not taken those before it and there is no more room for them.

        Raises:
            WaitTimeout: there was none within the group's limit.
        """

    @abstractmethod
    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        """Begin to receive into a contiguous tensor of the sender's size and type."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group, in place. Every rank gets the same bits; 16-bit types are summed in float32."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which must agree in shape and type, in rank order."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]], devices: Sequence[str] = ()) -> Communicator:
        """Cut the group into disjoint ``groups`` that cover it; collective. Returns the caller's own new group.

        ``split([range(size)])`` makes a second, independent group of the same ranks. ``devices`` names each group's
        device type, for transports that have a library of their own for it; host memory otherwise.
        """

    def advance(self) -> None:
        """Let transfers go on, where they do so only in calls; for a rank that waits for something else."""
        return

    def close(self) -> None:
        """Give back threads, sockets and memory that the transport holds for this group; collective. Nothing may be on its way."""
        return

    # Made of the calls above, which a transport may do better:

    def isend_after(self, header: bytes, tensor: torch.Tensor, dests: Sequence[int]) -> list[Handle]:
        """Begin to send a contiguous tensor after some bytes, as one message of uint8, to each of these ranks.

        Args:
            header: as many bytes as keep the tensor's elements aligned.
        """
        message = torch.empty(len(header) + tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        message[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        message[len(header) :].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return [self.isend(message, dest) for dest in dests]

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int], root: int = 0) -> list[torch.Tensor] | None:
        """On ``root`` the flat tensors of all ranks in rank order, rank r's with ``sizes[r]`` elements; None elsewhere."""
        if self.rank != root:
            self.isend(tensor, root).wait(f"room at rank {root} for gathered data")
            return None
        parts = [tensor.reshape(-1) if r == root else tensor.new_empty(sizes[r]) for r in range(self.size)]
        handles = [(r, self.irecv(parts[r], r)) for r in range(self.size) if r != root]
        for source, handle in handles:
            handle.wait(f"gathered data from rank {source}")
        return parts

    def barrier(self) -> None:
        """Wait until every rank of the group has come here."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any lengths, in rank order."""
        lengths = [int(length) for length in self.all_gather(torch.tensor([len(data)], dtype=torch.int64))]
        if max(lengths) == 0:
            return [b""] * self.size
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        gathered = self.all_gather(padded)
        return [tensor[:length].numpy().tobytes() for tensor, length in zip(gathered, lengths, strict=True)]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors are added: float32 for 16-bit dtypes, which are rounded once at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def name_ranks(ranks: Sequence[int]) -> str:
    """``ranks 2-4`` or ``ranks 0, 3``, by their numbers in the world."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


class Finished(Handle):
    """A transfer that needs no waiting."""

    def wait(self, what: str, timeout: float | None = None) -> None:
        return

    def done(self) -> bool:
        return True
