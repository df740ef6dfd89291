"""PipelineCommunicator: activations from stage to stage, and results from the last stage to rank 0.

Every message starts with its step id, which the receiver checks: a rank that is out of step fails at once instead of producing
wrong tokens three layers later. The step id of activations between accelerators is a message of its own in host memory.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from labinfer.comm.communicator import Communicator, Handle
from labinfer.comm.send_queue import SendQueue

HEADER = struct.Struct("=qq")
"""Message header: step id, and number of rows (for a result: of bytes). Its size keeps the payload aligned."""
HEADER_BYTES = HEADER.size


class StepMismatch(RuntimeError):
    """Received message belongs to another step than expected."""


@dataclass(kw_only=True)
class Arrival:
    """Pending receive of a step's activations from the previous stage."""

    step_id: int
    header: torch.Tensor
    """``HEADER`` of the message, in host memory, so that checking it does not synchronize with an accelerator."""
    hidden_TD: torch.Tensor
    handles: tuple[Handle, ...]
    source: str
    device: torch.device

    def wait(self) -> torch.Tensor:
        """Wait for the activations: (T, D), in the sender's dtype, on this rank's device."""
        for handle in self.handles:
            handle.wait(f"the activations of step {self.step_id} from {self.source}")
        _check_header(self.header, self.step_id, len(self.hidden_TD), self.source)
        return self.hidden_TD.to(self.device)


class PipelineCommunicator:
    """Transfers of one rank from the previous stage, to the next stage and to rank 0.

    Args:
        comm: communicator for activations between all ranks, in device memory if possible.
        host_comm: communicator for results between all ranks, and for headers of activations in device memory; in host memory.
        source: rank that sends activations to this one; None on the first stage.
        destinations: ranks that receive activations from this one; empty on the last stage, and for senders that a next stage with fewer
            TP ranks does not need.
        sampling_rank: rank that samples and sends results to rank 0.
        labels: rank → name in errors.
    """

    def __init__(
        self,
        comm: Communicator,
        host_comm: Communicator,
        *,
        source: int | None,
        destinations: Sequence[int],
        sampling_rank: int,
        labels: Mapping[int, str],
    ):
        self._comm, self._host_comm = comm, host_comm
        self._source = source
        self._destinations = tuple(destinations)
        self._sampling_rank = sampling_rank
        self._labels = dict(labels)
        self._sends = SendQueue()
        self.results_travel = sampling_rank != 0
        """Whether results are sent at all, that is, whether another rank than rank 0 samples."""
        self.bytes_sent: Counter[int] = Counter()
        """Bytes sent since the start, by destination rank."""

    def post_activations(
        self, step_id: int, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Arrival:
        """Post the receive of a step's activations, ahead of their use."""
        if self._comm.memory(self._source) != "cpu":
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            hidden_TD = torch.empty(num_tokens, width, dtype=dtype, device=device)
            handles = self._host_comm.irecv(header, self._source), self._comm.irecv(hidden_TD, self._source)
        else:
            message = torch.empty(HEADER_BYTES + num_tokens * width * dtype.itemsize, dtype=torch.uint8)
            header, hidden_TD = message[:HEADER_BYTES], message[HEADER_BYTES:].view(dtype).view(num_tokens, width)
            handles = (self._comm.irecv(message, self._source),)
        return Arrival(
            step_id=step_id,
            header=header,
            hidden_TD=hidden_TD,
            handles=handles,
            source=self._labels[self._source],
            device=device,
        )

    def send_activations(self, step_id: int, hidden_TD: torch.Tensor) -> None:
        """Send a step's activations to the next stage asynchronously."""
        if not self._destinations:
            return
        header, hidden_TD = HEADER.pack(step_id, hidden_TD.shape[0]), hidden_TD.contiguous()
        on_host = [dest for dest in self._destinations if self._comm.memory(dest) == "cpu"]
        on_cards = [dest for dest in self._destinations if dest not in on_host]
        sends = list(zip(on_host, self._comm.isend_after(header, hidden_TD, on_host), strict=True)) if on_host else []
        if on_cards:  # where a header would be two copies that synchronize
            kept_TD = hidden_TD.clone()  # the next step may overwrite ``hidden_TD`` before it is sent
            host_header = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            sends += [(dest, self._host_comm.isend(host_header, dest)) for dest in on_cards]
            sends += [(dest, self._comm.isend(kept_TD, dest)) for dest in on_cards]
        for dest, send in sends:
            self._sends.keep(send, f"{self._labels[dest]} to receive the activations of step {step_id}")
        for dest in self._destinations:
            self.bytes_sent[dest] += HEADER_BYTES + hidden_TD.nbytes

    def post_result(self, step_id: int, capacity: int) -> ResultArrival:
        """Rank 0: post the receive of a step's result of up to ``capacity`` bytes."""
        buffer = torch.empty(HEADER_BYTES + capacity, dtype=torch.uint8)
        handle = self._host_comm.irecv(buffer, self._sampling_rank)
        return ResultArrival(step_id, buffer, handle, self._labels[self._sampling_rank])

    def send_result(self, step_id: int, data: bytes, capacity: int) -> None:
        """Sampling rank: send a step's result to rank 0 asynchronously.

        Args:
            capacity: capacity that rank 0 posted; both ends of a transfer must have equal sizes.
        """
        assert len(data) <= capacity, f"step {step_id} has a result of {len(data)} bytes, but announced {capacity}"
        padded = bytearray(HEADER_BYTES + capacity)
        HEADER.pack_into(padded, 0, step_id, len(data))
        padded[HEADER_BYTES : HEADER_BYTES + len(data)] = data
        self.bytes_sent[0] += len(padded)
        self._sends.keep(
            self._host_comm.isend(torch.frombuffer(padded, dtype=torch.uint8), 0),
            f"{self._labels[0]} to receive the result of step {step_id}",
        )

    def drain(self) -> None:
        """Wait until every send to the next stage is complete."""
        self._sends.drain()


@dataclass
class ResultArrival:
    """Pending receive of a step's result on rank 0."""

    step_id: int
    buffer: torch.Tensor
    handle: Handle
    source: str

    def wait(self) -> memoryview:
        """Wait for the bytes of the result."""
        self.handle.wait(f"the result of step {self.step_id} from {self.source}")
        data = memoryview(self.buffer.numpy())
        step_id, length = HEADER.unpack_from(data)
        capacity = len(data) - HEADER_BYTES
        if step_id != self.step_id or not 0 <= length <= capacity:
            raise StepMismatch(
                f"rank 0 expected the result of step {self.step_id} in up to {capacity} bytes from {self.source}, "
                f"but got {length} bytes of step {step_id}"
            )
        return data[HEADER_BYTES : HEADER_BYTES + length]


def _check_header(header: torch.Tensor, step_id: int, rows: int, source: str) -> None:
    got_step, got_rows = header.view(torch.int64).tolist()
    if (got_step, got_rows) != (step_id, rows):
        raise StepMismatch(
            f"expected {rows} rows of step {step_id} from {source}, but got {got_rows} rows of step {got_step}"
        )
