"""Communicator: a group of ranks that exchange tensors, with one interface for every transport; Handle: one transfer.

Three transports: ``MpiCommunicator``, ``TorchCommunicator`` and ``LocalCommunicator`` (threads of one process; also the
communicator of a group of one). ``SharedMemoryCommunicator`` and ``RingCommunicator`` wrap any of them and send reductions,
gathers and small messages between ranks of one machine through shared memory.
``docs/operations.md`` says which is used when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from labinfer.comm.progress import Progress


class Handle(ABC):
    """Handle of an asynchronous transfer. Its buffer belongs to the transport until ``wait`` returns or ``done`` is true."""

    @abstractmethod
    def wait(self, what: str, timeout: float | None = None) -> None:
        """Wait until the transfer is complete, giving up the core meanwhile.

        Args:
            what: the transfer and its peer, such as ``activations from rank 1``, for errors and the watchdog.
            timeout: seconds; None for the group's timeout, ``inf`` for no timeout.

        Raises:
            WaitTimeout: the timeout passed.
            PeerLost: the peer is gone.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether the transfer is complete; never blocks. May stay False on transports that can only wait."""


class Communicator(ABC):
    """Group of ranks. All ranks must call every collective, in the same order."""

    rank: int
    """Rank of this process in the group."""
    size: int
    """Number of ranks in the group."""
    name: str
    """Transport, for tables: ``mpi``, ``gloo``, ``nccl``, ``local``, ``shared memory``."""
    progress: Progress
    members: str
    """World ranks of the group, for errors: ``ranks 0-3``."""
    polls: bool = False
    """Whether transfers progress only inside calls of the transport (while waiting, or in ``advance``)."""

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dest: int) -> Handle:
        """Send a contiguous tensor asynchronously. Messages between two ranks arrive in order. Blocks while the buffer for unreceived
        messages is full.

        Raises:
            WaitTimeout: the buffer stayed full for the group's timeout.
        """

    @abstractmethod
    def irecv(self, tensor: torch.Tensor, source: int) -> Handle:
        """Receive asynchronously into a contiguous tensor of the sender's size and dtype."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place. All ranks get bitwise equal results; 16-bit dtypes accumulate in float32."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of all ranks in rank order. Shapes and dtypes must be equal."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]], backends: Sequence[str] = ()) -> Communicator:
        """Split the group into disjoint ``groups`` that cover it; collective. Returns the new group of this rank.

        ``split([range(size)])`` makes a second, independent group of all ranks. ``backends`` names the library of each group for
        transports that have several, such as ``nccl``; the default and an empty name are for host memory.
        """

    def memory(self, peer: int) -> str:
        """Device type of the memory that messages to and from ``peer`` must be in; other tensors are copied to such memory first."""
        return "cpu"

    def advance(self) -> None:
        """Progress pending transfers, if the transport does so only inside calls. Called by a rank that waits for
        something else than a transfer."""
        return

    def close(self) -> None:
        """Release threads, sockets and memory of this group; collective. No transfer may be pending."""
        return

    # Composed of the calls above; a transport may override them with something faster.

    def isend_after(self, header: bytes, tensor: torch.Tensor, dests: Sequence[int]) -> list[Handle]:
        """Send ``header`` and a contiguous tensor as one uint8 message in host memory to each rank of ``dests``, asynchronously.

        Args:
            header: bytes whose length keeps the tensor's elements aligned.
        """
        message = torch.empty(len(header) + tensor.nbytes, dtype=torch.uint8)
        message[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        message[len(header) :].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return [self.isend(message, dest) for dest in dests]

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int], root: int = 0) -> list[torch.Tensor] | None:
        """Gather flat tensors to ``root`` in rank order; the tensor of rank r has ``sizes[r]`` elements. None on other ranks."""
        if self.rank != root:
            self.isend(tensor, root).wait(f"room at rank {root} for gathered data")
            return None
        parts = [tensor.reshape(-1) if r == root else tensor.new_empty(sizes[r]) for r in range(self.size)]
        handles = [(r, self.irecv(parts[r], r)) for r in range(self.size) if r != root]
        for source, handle in handles:
            handle.wait(f"gathered data from rank {source}")
        return parts

    def barrier(self) -> None:
        """Wait until every rank of the group has called ``barrier``."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8))

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather ``data`` of every rank, in rank order. Lengths may differ."""
        lengths = [int(length) for length in self.all_gather(torch.tensor([len(data)], dtype=torch.int64))]
        if max(lengths) == 0:
            return [b""] * self.size
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        gathered = self.all_gather(padded)
        return [tensor[:length].numpy().tobytes() for tensor, length in zip(gathered, lengths, strict=True)]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of sums: float32 for 16-bit dtypes, which are rounded once at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def name_ranks(ranks: Sequence[int]) -> str:
    """Text that names world ranks: ``ranks 2-4`` or ``ranks 0, 3``."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


class Finished(Handle):
    """Handle of a transfer that is already complete."""

    def wait(self, what: str, timeout: float | None = None) -> None:
        return

    def done(self) -> bool:
        return True
