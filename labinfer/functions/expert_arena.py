"""``ExpertArena``: memory for those of a rank's experts that were used last, and a file that has them all."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from labinfer.errors import UserError
from labinfer.functions.packed_experts import MatrixCodes, PackedExperts
from labinfer.functions.protocols import ExpertFunctions, Functions

PARTS = 4
"""A layer's experts are read in about so many parts, so that one is multiplied with while the next is read."""
LEAST_SLOTS = 2
"""One to multiply with, and one to read into."""


@dataclass
class ExpertStats:
    """Counters of the experts that were asked for. Times in seconds."""

    hits: int = 0
    """Experts that were in memory."""
    misses: int = 0
    bytes_read: int = 0
    stall_time: float = 0.0
    """Time in which nothing could be computed for want of an expert."""


class ExpertArena:
    """Slots for experts of all layers of a rank, the least recently used one given up first.

    A thread reads from the file what a step needs, while parts of the same step are computed.

    Args:
        num_bytes: of all slots.
        folder: where the file is; it has no name there, and goes with the process.

    Raises:
        UserError: there can be no file.
    """

    def __init__(self, num_bytes: int, folder: Path, clock: Callable[[], float] = time.perf_counter):
        self.stats = ExpertStats()
        self._num_bytes, self._folder, self._clock = num_bytes, folder, clock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as the arena
        except OSError as error:
            raise UserError(f"--expert-offload: no file for experts in {folder} ({error.strerror})") from None
        self._end = 0
        self._slots_SB = torch.empty(0, 0, dtype=torch.uint8)
        self._used: OrderedDict[int, int] = OrderedDict()
        """Slots by the expert's position in the file, the least recently used first."""
        self._free: list[int] = []
        self._reads: dict[int, Future[None]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="expert-reader")

    def reset_stats(self) -> None:
        """Count from 0 again."""
        self.stats = ExpertStats()

    def write(self, data_B: torch.Tensor) -> int:
        """Append an expert to the file, and keep it in a slot while there are free ones. Returns its position.

        Raises:
            UserError: the disk is full, the slots are too few, or not all experts are of one size.
        """
        if not self._end:
            self._make_slots(len(data_B))
        if len(data_B) != (expert_bytes := self._slots_SB.shape[1]):
            raise UserError(
                f"--expert-offload needs experts of one size; those of this checkpoint take {expert_bytes} and {len(data_B)} "
                "bytes: leave it out, or give --quantization none"
            )
        position, view = self._end, memoryview(data_B.numpy())
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, self._end)
                self._end, view = self._end + written, view[written:]
        except OSError as error:
            raise UserError(
                f"--expert-offload: the experts' file in {self._folder} ends at {self._end} bytes ({error.strerror})"
            ) from None
        if self._free:
            self._used[position] = slot = self._free.pop()
            self._slots_SB[slot] = data_B
        return position

    def parts(self, positions: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """Addresses of experts, some at a time in the order given, and whether they are the last; they hold until the next are
        asked for."""
        missing = [position for position in positions if position not in self._used]
        if missing and hasattr(os, "posix_fadvise"):
            for position in missing:
                os.posix_fadvise(self._file.fileno(), position, self._slots_SB.shape[1], os.POSIX_FADV_WILLNEED)
        for position in positions:  # what is there already is given away last
            if position in self._used:
                self._used.move_to_end(position)
        groups = self._split(positions, set(missing))
        for now, ahead in zip([[], *groups], [*groups, []], strict=True):
            self._fetch(ahead, kept={*now, *ahead})
            if now:
                yield [self._address(position) for position in now], not ahead

    def _split(self, positions: Sequence[int], missing: set[int]) -> list[list[int]]:
        """Parts of which two have room at once, and none has many more experts to read than the others."""
        most, most_missing = len(self._slots_SB) // 2, max(1, -(-len(missing) // PARTS))
        groups: list[list[int]] = []
        num_missing = most_missing
        for position in positions:
            if not groups or len(groups[-1]) == most or (num_missing == most_missing and position in missing):
                groups.append([])
                num_missing = 0
            groups[-1].append(position)
            num_missing += position in missing
        return groups

    def _fetch(self, positions: Sequence[int], kept: set[int]) -> None:
        """Give every expert a slot, and have those that are not in memory read; slots of ``kept`` are not given away."""
        for position in positions:
            if position in self._used:
                self.stats.hits += 1
                continue
            self.stats.misses += 1
            slot = self._free.pop() if self._free else self._evict(kept)
            self._used[position] = slot
            self._reads[position] = self._reader.submit(self._read, position, slot)

    def _evict(self, kept: set[int]) -> int:
        position = next(position for position in self._used if position not in kept)
        if position in self._reads:  # of a step that failed
            self._reads.pop(position).result()
        return self._used.pop(position)

    def _address(self, position: int) -> int:
        """Address of an expert, once it is read."""
        if position in self._reads:
            begin = self._clock()
            self._reads.pop(position).result()
            self.stats.stall_time += self._clock() - begin
        return self._slots_SB[self._used[position]].data_ptr()

    def _read(self, position: int, slot: int) -> None:
        view = memoryview(self._slots_SB[slot].numpy())
        while view:
            count = os.preadv(self._file.fileno(), [view], position)
            if not count:
                raise OSError(f"the experts' file ends at {position}")
            self.stats.bytes_read += count
            position, view = position + count, view[count:]

    def _make_slots(self, expert_bytes: int) -> None:
        count = self._num_bytes // expert_bytes
        if count < LEAST_SLOTS:
            raise UserError(
                f"--expert-offload has room for {count} experts of {expert_bytes} bytes; give {LEAST_SLOTS * expert_bytes} "
                "bytes at least"
            )
        self._slots_SB = torch.empty(count, expert_bytes, dtype=torch.uint8)
        self._free = list(reversed(range(count)))


class OffloadedExperts:
    """Experts of a layer in an arena; ``PackedExperts`` has the fields that are not explained here.

    Args:
        make_experts: makes the layout that they are packed in.
    """

    def __init__(self, arena: ExpertArena, make_experts: Callable[..., PackedExperts], **shape):
        self._arena, self._make, self._shape = arena, make_experts, shape
        self._layer = make_experts(**shape | {"device": torch.device("meta")})
        if self._layer.addresses_E is None:
            raise UserError(
                "--expert-offload needs the compiled experts, and these are torch's: it is for CPUs, with a C++ compiler and "
                "without --functions reference"
            )
        self.num_experts, self.hidden_size, self.columns = shape["num_experts"], shape["hidden_size"], shape["columns"]
        self.dtype, self.device, self.nbytes = shape["dtype"], shape["device"], self._layer.nbytes
        self._positions = [0] * self.num_experts

    def pack(self, index: int, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> None:
        self._put(index, lambda alone: alone.pack(0, gate_up_FD, down_DF))

    def pack_codes(self, index: int, gate_up: MatrixCodes, down: MatrixCodes) -> None:
        self._put(index, lambda alone: alone.pack_codes(0, gate_up, down))

    def _put(self, index: int, pack: Callable[[PackedExperts], None]) -> None:
        alone = self._make(**self._shape | {"num_experts": 1})
        pack(alone)
        self._positions[index] = self._arena.write(alone.data_EB[0])

    def clone(self) -> OffloadedExperts:
        return self  # they are only read

    def parts(self, ids_TA: torch.Tensor, first: int) -> Iterator[tuple[PackedExperts, bool]]:
        addresses_E = self._layer.addresses_E.zero_()
        local_ids = ids_TA.unique().tolist()
        chosen = [expert - first for expert in local_ids if 0 <= expert - first < self.num_experts]
        if not chosen:
            yield self._layer, True
        done = 0
        for addresses, is_last in self._arena.parts([self._positions[index] for index in chosen]):
            part = chosen[done : done + len(addresses)]
            done += len(part)
            addresses_E[part] = torch.tensor(addresses)
            yield self._layer, is_last
            addresses_E.zero_()


def offload(functions: Functions, arena: ExpertArena) -> Functions:
    """The same functions with all experts in this arena."""

    def offloaded(own: ExpertFunctions) -> ExpertFunctions:
        return dataclasses.replace(own, make_experts=partial(OffloadedExperts, arena, own.make_experts))

    coded = {quantization: offloaded(own) for quantization, own in functions.coded_experts.items()}
    return dataclasses.replace(functions, experts=offloaded(functions.experts), coded_experts=coded)
