"""``AcceleratorCopies``: copies between host memory and an accelerator, as few and as asynchronous as possible.

A copy from or to pageable memory blocks the host until the device has run everything before it
(``docs/decisions/0082-waits-of-accelerators.md``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from labinfer.base.errors import first_line
from labinfer.worker.host_copies import HostCopies, Pairs

logger = logging.getLogger(__name__)

NUM_BUFFERS = 4
"""Pinned buffers that uploads use in turn: index tensors and window tables of two steps."""
BUFFER_BYTES = 1 << 19
"""Initial size of a pinned buffer: the initial capacity of an ``IndexBuffer``."""
STAGED_BYTES = 64 << 20
"""Maximum bytes of a transfer of blocks between an accelerator and the host, unless a single pool moves more."""
ALIGNMENT = 16
"""Alignment in bytes of each pool's blocks in the buffer of a transfer."""


def make_host_copies(device: torch.device) -> HostCopies:
    """Make the ``HostCopies`` of a device: plain ones for the CPU, ``AcceleratorCopies`` for any other."""
    return HostCopies() if device.type == "cpu" else AcceleratorCopies(device)


class AcceleratorCopies(HostCopies):
    """Copies of a rank on an accelerator. Uploads are asynchronous, through pinned buffers, if torch can pin host memory and record events
    for the device. Other copies pack several tensors into one transfer."""

    def __init__(self, device: torch.device):
        self._device, self._uploads = device, None
        try:
            self._uploads = PinnedUploads(device)
        except RuntimeError as error:  # not implemented by every accelerator's plugin
            logger.debug("uploads to %s are from pageable memory: %s", device, first_line(error))

    def upload(self, numbers: torch.Tensor, dest: torch.Tensor) -> None:
        if self._uploads is None:
            dest.copy_(numbers)
        else:
            self._uploads.copy(numbers, dest)

    def upload_all(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not parts:
            return parts
        sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        on_host = torch.empty(sum(sizes), dtype=torch.uint8)
        on_device = torch.empty_like(on_host, device=self._device)
        for staged, part in zip(_views(on_host.split(sizes), parts), parts, strict=True):
            staged.copy_(part)
        self.upload(on_host, on_device)
        return _views(on_device.split(sizes), parts)

    def download(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        words = [part.view(torch.int32) if part.dtype == torch.float32 else part.int() for part in parts]
        words = torch.cat(words, dim=1).cpu().split([part.shape[1] for part in parts], dim=1)
        pairs = zip(words, parts, strict=True)
        return [each.view(torch.float32) if part.dtype == torch.float32 else each for each, part in pairs]

    def move(self, pairs: Pairs, source: torch.Tensor, dest: torch.Tensor) -> None:
        from_device, to_device = (pool.device for pool in pairs[0])
        if from_device == to_device:
            super().move(pairs, source, dest)
        else:
            move_staged(pairs, source.to(from_device), dest.to(to_device))


def _views(staged: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of staged bytes with the dtypes and shapes of ``parts``."""
    pairs = zip(staged, parts, strict=True)
    return [each[: part.nbytes].view(part.dtype).view(part.shape) for each, part in pairs]


class PinnedUploads:
    """Copies host tensors to an accelerator asynchronously, through pinned buffers in turn.

    A buffer is filled again only after its last copy is complete.

    Raises:
        RuntimeError: torch cannot pin memory or record events for the device.
    """

    def __init__(self, device: torch.device):
        self._turns = deque((_pinned(BUFFER_BYTES), torch.Event(device)) for _ in range(NUM_BUFFERS))
        for _, event in self._turns:
            event.record()

    def copy(self, numbers: torch.Tensor, dest: torch.Tensor) -> None:
        """Copy contiguous ``numbers`` to ``dest`` of the same dtype."""
        buffer, event = self._turns.popleft()
        if not event.query():
            event.synchronize()
        if len(buffer) < numbers.nbytes:
            buffer = _pinned(2 * numbers.nbytes)
        staged = buffer[: numbers.nbytes].view(numbers.dtype).view(numbers.shape)
        staged.copy_(numbers)
        dest.copy_(staged, non_blocking=True)
        event.record()
        self._turns.append((buffer, event))


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def move_staged(pairs: Pairs, source: torch.Tensor, dest: torch.Tensor) -> None:
    """Move slices of pools between two devices, see ``HostCopies.move``. Each index tensor is on the device of its pools. Slices of
    several pools share a transfer of up to ``STAGED_BYTES``."""
    count, groups, num_bytes = len(source), [[]], 0
    for pair in pairs:
        num_bytes += _staged_bytes(pair[0], count)
        if groups[-1] and num_bytes > STAGED_BYTES:
            groups.append([])
            num_bytes = _staged_bytes(pair[0], count)
        groups[-1].append(pair)
    for group in groups:
        total = sum(_staged_bytes(pool, count) for pool, _ in group)
        staged = torch.empty(total, dtype=torch.uint8, device=source.device)
        for part, (pool, _) in zip(_staged_parts(staged, group, count), group, strict=True):
            part.copy_(pool[source])
        staged = staged.to(dest.device)
        for part, (_, given) in zip(_staged_parts(staged, group, count), group, strict=True):
            given[dest] = part


def _staged_parts(staged: torch.Tensor, group: Pairs, count: int) -> Iterator[torch.Tensor]:
    """Views of a staging buffer for ``count`` slices of each pool of ``group``."""
    begin = 0
    for pool, _ in group:
        part = staged[begin : begin + count * pool[0].nbytes]
        yield part.view(pool.dtype).view(count, *pool.shape[1:])
        begin += _staged_bytes(pool, count)


def _staged_bytes(pool: torch.Tensor, count: int) -> int:
    """Bytes of ``count`` slices of ``pool`` in a staging buffer."""
    return -(-count * pool[0].nbytes // ALIGNMENT) * ALIGNMENT
