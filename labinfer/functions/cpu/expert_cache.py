"""``ExpertCache``: LRU cache of a rank's experts in memory, backed by a file that holds all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from labinfer.base.errors import UserError
from labinfer.functions.cpu.file_reader import BLOCK_BYTES, NUM_THREADS, PIECE_BYTES, FileReader
from labinfer.functions.cpu.library import Library
from labinfer.functions.expert_offload import ExpertStats, needs_compiled_experts
from labinfer.functions.family_protocols import MakeExperts
from labinfer.functions.functions import ExpertFunctions, Functions
from labinfer.functions.packed_experts import ExpertShape, PackedExperts
from labinfer.weights.codes import Codes

PARTS = 4
"""Maximum number of parts into which a layer's missing experts are divided: one part is computed while the next is
read."""
LEAST_SLOTS = 2
"""Minimum slots: one expert to compute, and one to read into."""


class ExpertCache:
    """Memory slots for experts of all layers of a rank, with LRU eviction.

    Threads read a layer's experts from the file ahead of the computation, as far as there are slots.

    Args:
        num_bytes: size of all slots.
        folder: folder of the file, which is unnamed and is deleted when the process ends. It is read with direct I/O if the file system
            supports it, as the page cache would hold the experts twice.

    Raises:
        UserError: the file cannot be created.
    """

    def __init__(self, library: Library, num_bytes: int, folder: Path, clock: Callable[[], float] = time.perf_counter):
        self.stats = ExpertStats()
        self._library, self._num_bytes, self._folder, self._clock = library, num_bytes, folder, clock
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - the file lives as long as the cache
        except OSError as error:
            raise UserError(f"--expert-offload: no file for experts in {folder} ({error.strerror})") from None
        self._end = self._expert_bytes = 0
        self._slots_SB, self._begin = torch.empty(0, 0, dtype=torch.uint8), 0
        self._padded_B = torch.empty(0, dtype=torch.uint8)  # staging buffer for writing an expert
        self._used: OrderedDict[int, int] = OrderedDict()
        """Position of an expert in the file → its slot; least recently used first."""
        self._free: list[int] = []
        self._reader: FileReader | None = None
        self._reads: set[int] = set()
        """Positions of experts whose reads have not been waited for."""

    def offload(self, functions: Functions) -> Functions:
        """Copy of ``functions`` whose ``make_experts`` keeps all experts in this cache."""

        def offloaded(own: ExpertFunctions) -> ExpertFunctions:
            return dataclasses.replace(own, make_experts=partial(OffloadedExperts, self, own.make_experts))

        coded = {quantization: offloaded(own) for quantization, own in functions.coded_experts.items()}
        return dataclasses.replace(functions, experts=offloaded(functions.experts), coded_experts=coded)

    def reset_stats(self) -> None:
        """Reset the statistics of cache hits and reads to 0."""
        self.stats = ExpertStats()

    def expect(self, expert_bytes: int) -> None:
        """Check that experts of ``expert_bytes`` each can be cached, before the first one is written.

        Raises:
            UserError: there are too few slots, or earlier experts have another size.
        """
        self._expert_bytes = self._expert_bytes or expert_bytes
        if expert_bytes != self._expert_bytes:
            raise UserError(
                f"--expert-offload needs experts of one size; those of this checkpoint take {self._expert_bytes} and "
                f"{expert_bytes} bytes: leave it out, or give --quantization none"
            )
        size = _round_up(expert_bytes)
        if (count := self._num_bytes // size) < LEAST_SLOTS:
            raise UserError(
                f"--expert-offload holds {count} experts of {size} bytes; give at least {LEAST_SLOTS * size} bytes"
            )

    def write(self, data_B: torch.Tensor) -> int:
        """Append an expert to the file, and cache it in a slot while slots are free. Returns its position in the file.

        Raises:
            UserError: the disk is full, there are too few slots, or experts differ in size.
        """
        self.expect(len(data_B))
        position = self._end
        try:
            if not position:
                self._make_slots()
            self._padded_B[: len(data_B)] = data_B
            view = memoryview(self._padded_B.numpy())
            while view:
                written = os.pwrite(self._file.fileno(), view, self._end)
                self._end, view = self._end + written, view[written:]
        except OSError as error:
            raise UserError(
                f"--expert-offload: the experts' file in {self._folder} ends at {self._end} bytes ({error.strerror})"
            ) from None
        if self._free:
            self._used[position] = slot = self._free.pop()
            self._slots_SB[slot] = self._padded_B
        return position

    def parts(self, positions: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """Yield (addresses, is_last) of one part after the other of the experts at ``positions`` in the file. Addresses
        are valid until the next part is requested.

        Raises:
            OSError: the file cannot be read. The experts that were being read are then not in memory.
        """
        for position in list(self._reads):  # reads that a failed step did not wait for
            with contextlib.suppress(OSError):
                self._finish(position)
        for position in positions:  # this call's cached experts are evicted last
            if position in self._used:
                self._used.move_to_end(position)
        groups = self._split(positions)
        end = 0
        for begin, group in enumerate(groups):
            while end < len(groups) and sum(map(len, groups[begin : end + 1])) <= len(self._slots_SB):
                end += 1
                self._fetch(groups[end - 1], kept=set(itertools.chain(*groups[begin:end])))
            yield [self._address(position) for position in group], begin == len(groups) - 1

    def _split(self, positions: Sequence[int]) -> list[list[int]]:
        """Divide the ``positions`` of experts into parts. Memory holds two parts: one is read while the other computes.
        The experts before the first one that is missing in memory form parts of their own. Each later part begins with
        a missing expert, unless the part before it is full, and all have about as many missing experts."""
        missing = {position for position in positions if position not in self._used}
        most, size = self._slots_SB.shape
        most, at_once = most // 2, max(1, NUM_THREADS * PIECE_BYTES // max(size, PIECE_BYTES))
        most_missing = max(at_once, -(-len(missing) // PARTS))
        groups: list[list[int]] = []
        left = 0
        for position in positions:
            is_missing = position in missing
            if not groups or len(groups[-1]) == most or (is_missing and not left):
                groups.append([])
                left = most_missing if is_missing else 0
            groups[-1].append(position)
            left -= is_missing
        return groups

    def _fetch(self, positions: Sequence[int], kept: set[int]) -> None:
        """Assign each expert a slot and start reading those that are not in memory; slots of ``kept`` are not evicted."""
        for position in positions:
            if position in self._used:
                self.stats.hits += 1
                continue
            self.stats.misses += 1
            self._reader.read(self._take_slot(position, kept), position)
            self._reads.add(position)

    def _take_slot(self, position: int, kept: set[int]) -> int:
        """A slot for an expert: a free slot, or the slot of the least recently used expert not in ``kept``."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._used.pop(next(other for other in self._used if other not in kept))
        self._used[position] = slot
        return slot

    def _address(self, position: int) -> int:
        """Address of an expert; waits until it is read."""
        if position in self._reads:
            begin = self._clock()
            self._finish(position)
            self.stats.stall_time += self._clock() - begin
        return self._begin + self._used[position] * self._slots_SB.shape[1]

    def _finish(self, position: int) -> None:
        """Wait until an expert is read; if that fails, free its slot.

        Raises:
            OSError: the read failed.
        """
        self._reads.remove(position)
        try:
            self._reader.finish(self._used[position])
        except (OSError, EOFError) as error:
            self._free.append(self._used.pop(position))
            if isinstance(error, EOFError):
                size = os.fstat(self._file.fileno()).st_size
                raise OSError(f"the experts' file in {self._folder} ends at {size} of {self._end} bytes") from None
            raise OSError(
                error.errno, f"the experts' file in {self._folder} cannot be read at {position}: {error.strerror}"
            ) from None
        self.stats.bytes_read += self._slots_SB.shape[1]

    def _make_slots(self) -> None:
        size = _round_up(self._expert_bytes)
        count = self._num_bytes // size
        memory_B = torch.empty(count * size + BLOCK_BYTES, dtype=torch.uint8)
        begin = -memory_B.data_ptr() % BLOCK_BYTES
        self._slots_SB = memory_B[begin : begin + count * size].view(count, size)
        self._begin = self._slots_SB.data_ptr()
        self._padded_B = torch.zeros(size, dtype=torch.uint8)
        self._reader = FileReader(self._library, self._file, self._slots_SB)
        self._free = list(reversed(range(count)))


def _round_up(expert_bytes: int) -> int:
    """Slot size of an expert in bytes."""
    return -(-expert_bytes // BLOCK_BYTES) * BLOCK_BYTES


class OffloadedExperts:
    """A layer's experts in an `ExpertCache`; ``PackedExperts`` documents the other fields.

    Args:
        make_experts: allocates experts in their packed layout.
    """

    data_EB = addresses_E = None

    def __init__(self, cache: ExpertCache, make_experts: MakeExperts, shape: ExpertShape, device: torch.device):
        self._cache, self._make, self._shape, self._device = cache, make_experts, shape, device
        self._layer = make_experts(shape, torch.device("meta"))
        if self._layer.addresses_E is None:
            raise needs_compiled_experts()
        cache.expect(self._alone(torch.device("meta")).data_EB.shape[1])
        self.num_experts, self.nbytes = shape.num_experts, self._layer.nbytes
        self._positions = [0] * self.num_experts

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        self._put(index, lambda alone: alone.pack(0, gate_up_FD, down_DF))

    def pack_codes(self, index: int, gate_up: Codes, down: Codes) -> None:
        self._put(index, lambda alone: alone.pack_codes(0, gate_up, down))

    def _put(self, index: int, pack: Callable[[PackedExperts], None]) -> None:
        alone = self._alone(self._device)
        pack(alone)
        self._positions[index] = self._cache.write(alone.data_EB[0])

    def _alone(self, device: torch.device) -> PackedExperts:
        """Memory for a single packed expert."""
        return self._make(dataclasses.replace(self._shape, num_experts=1), device)

    def clone(self) -> OffloadedExperts:
        return self  # experts are read-only

    def parts(self, ids_TA: torch.Tensor, first: int) -> Iterator[tuple[PackedExperts, bool]]:
        addresses_E = self._layer.addresses_E.numpy()  # NumPy writes several times faster than torch
        addresses_E[:] = 0
        ids = sorted(set(ids_TA.flatten().tolist()))
        chosen = [expert - first for expert in ids if 0 <= expert - first < self.num_experts]
        if not chosen:
            yield self._layer, True
        done = 0
        for addresses, is_last in self._cache.parts([self._positions[index] for index in chosen]):
            part = chosen[done : done + len(addresses)]
            done += len(part)
            addresses_E[part] = addresses
            yield self._layer, is_last
            addresses_E[part] = 0
