"""Experts in a file with some in memory: the same numbers, the last used ones kept, and what went wrong said."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.functions.cpu.expert_cache import ExpertCache, OffloadedExperts
from labinfer.functions.cpu.experts import CpuExperts
from labinfer.functions.cpu.file_reader import BLOCK_BYTES, PIECE_BYTES
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.launch.providers import reference_registry
from labinfer.native import compiler

CPU = torch.device("cpu")
SIZE, SLOT = 5000, 2 * BLOCK_BYTES
"""Bytes of an expert, and of its place in memory and in the file."""


@pytest.fixture
def cache(compiled_functions, tmp_path):
    """``cache(slots, experts)``: with so many experts in its file, which are bytes of their number, and their positions."""

    def make(slots: int, experts: int = 0) -> tuple[ExpertCache, list[int]]:
        made = ExpertCache(compiled_functions, slots * SLOT, tmp_path)
        return made, [made.write(torch.full((SIZE,), number, dtype=torch.uint8)) for number in range(experts)]

    return make


def numbers(made: ExpertCache, parts) -> list[list[int]]:
    """The experts at the addresses of each part, read at once."""
    slots = made._slots_SB
    found = []
    for addresses, _ in parts:
        rows = [(address - slots.data_ptr()) // SLOT for address in addresses]
        assert all(len(slots[row, :SIZE].unique()) == 1 for row in rows)
        found.append([int(slots[row, 0]) for row in rows])
    return found


def test_cache_gives_experts_in_order_also_more_than_it_has_slots(cache):
    made, positions = cache(slots=4, experts=11)
    parts = numbers(made, made.parts(positions))
    assert [number for part in parts for number in part] == list(range(11))
    assert all(len(part) <= 2 for part in parts)  # half of the slots, the other half is read into
    assert [is_last for _, is_last in made.parts(positions)] == [False] * 5 + [True]


def test_cache_keeps_what_was_used_last(cache):
    made, positions = cache(slots=4, experts=6)  # the first four are in memory
    for wanted in ((0, 1), (4,), (0, 1), (5,), (0, 1)):
        assert sum(numbers(made, made.parts([positions[number] for number in wanted])), []) == list(wanted)
    assert (made.stats.hits, made.stats.misses) == (6, 2)
    assert made.stats.bytes_read == 2 * SLOT
    numbers(made, made.parts([positions[2], positions[3]]))
    assert made.stats.misses == 4  # they had to go
    assert made.stats.stall_time > 0


def test_cache_reads_a_layer_in_some_parts_of_like_size(cache):
    made, positions = cache(slots=40, experts=60)
    parts = numbers(made, made.parts(positions[40:60]))
    assert parts == [list(range(begin, begin + 5)) for begin in (40, 45, 50, 55)]
    assert numbers(made, made.parts(positions[40:60])) == [list(range(40, 60))]  # in memory now


def test_experts_in_memory_come_before_those_that_are_read_at_once(cache):
    made, positions = cache(slots=20, experts=30)
    wanted = [0, 1, 20, 2, 21, 22, 3]
    assert numbers(made, made.parts([positions[number] for number in wanted])) == [[0, 1], [20, 2, 21, 22, 3]]


def test_cache_survives_a_step_that_ended_early(cache):
    made, positions = cache(slots=4, experts=8)
    for _ in made.parts(positions[4:]):
        break
    assert sum(numbers(made, made.parts(positions)), []) == list(range(8))


def test_failed_read_leaves_nothing_stale_in_memory(cache):
    made, positions = cache(slots=4, experts=8)
    file, last = made._file.fileno(), positions[4:]
    data = os.pread(file, 8 * SLOT, 0)
    os.ftruncate(file, 5 * SLOT)
    for _ in range(3):  # a slot that was lost or taken for read would show in the second time
        with pytest.raises(OSError, match=f"ends at {5 * SLOT} of {8 * SLOT} bytes"):
            numbers(made, made.parts(last))
    os.pwrite(file, data, 0)
    assert sum(numbers(made, made.parts(last)), []) == [4, 5, 6, 7]
    assert sum(numbers(made, made.parts(positions)), []) == list(range(8))
    assert sorted([*made._used.values(), *made._free]) == [0, 1, 2, 3]


@contextlib.contextmanager
def broken_disk(made: ExpertCache, folder: Path) -> Iterator[None]:
    """The cache's file is a folder, which cannot be read."""
    file = made._reader._file.fileno()
    kept, broken = os.dup(file), os.open(folder, os.O_RDONLY)
    os.dup2(broken, file)
    try:
        yield
    finally:
        os.dup2(kept, file)
        os.close(kept)
        os.close(broken)


def test_disk_that_fails_is_named(cache, tmp_path):
    made, positions = cache(slots=2, experts=3)
    message = f"experts' file in {tmp_path} cannot be read at {2 * SLOT}: Is a directory"
    with broken_disk(made, tmp_path), pytest.raises(OSError, match=message):
        numbers(made, made.parts(positions[2:]))
    assert numbers(made, made.parts(positions[2:])) == [[2]]


def test_cache_that_goes_while_it_reads_leaves_no_thread(cache):
    begin = threads()
    made, positions = cache(slots=4, experts=8)
    assert threads() > begin
    next(made.parts(positions[4:]))
    del made
    deadline = time.monotonic() + 10
    while threads() > begin and time.monotonic() < deadline:  # the system takes them off its list a moment later
        time.sleep(0.01)
    assert threads() <= begin


def threads() -> int:
    """Those of this process."""
    return len(os.listdir("/proc/self/task"))


def test_large_expert_is_read_in_pieces_and_as_a_whole(compiled_functions, tmp_path):
    """With bytes that tell where they stand."""
    size = 2 * PIECE_BYTES + BLOCK_BYTES
    made = ExpertCache(compiled_functions, 2 * size, tmp_path)
    expert = torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8)
    positions = [made.write(expert + number) for number in range(3)]
    for number in (2, 0, 1, 2):
        ((addresses, _),) = made.parts([positions[number]])
        row = (addresses[0] - made._slots_SB.data_ptr()) // size
        assert torch.equal(made._slots_SB[row], expert + number)


def test_reads_go_as_far_ahead_as_there_are_slots(cache):
    made, positions = cache(slots=6, experts=14)
    parts = made.parts(positions[6:])
    next(parts)
    assert made.stats.misses == 6, "three are multiplied with, three are under way"
    assert numbers(made, parts) == [[9, 10, 11], [12, 13]]


def test_cache_without_room_for_two_experts_is_refused(cache):
    with pytest.raises(UserError, match=r"--expert-offload holds 1 experts of 8192 bytes; give at least 16384 bytes"):
        cache(slots=1, experts=1)


def test_experts_of_two_sizes_are_refused(cache):
    made, _ = cache(slots=4, experts=1)
    with pytest.raises(UserError, match="experts of one size; those of this checkpoint take 5000 and 1200 bytes"):
        made.write(torch.zeros(1200, dtype=torch.uint8))


def test_cache_in_a_folder_that_cannot_be_is_refused(compiled_functions, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--expert-offload: no file for experts in"):
        ExpertCache(compiled_functions, SIZE, tmp_path / "file")


def test_full_disk_is_refused(cache, monkeypatch):
    made, _ = cache(slots=2)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"ends at 0 bytes \(No space left on device\)"):
        made.write(torch.zeros(SIZE, dtype=torch.uint8))


def test_experts_of_the_reference_cannot_be_offloaded(compiled_functions, tmp_path):
    made, functions = ExpertCache(compiled_functions, SIZE, tmp_path), reference_registry().select(CPU, torch.float32)
    with pytest.raises(UserError, match="--expert-offload needs the compiled CPU kernels"):
        OffloadedExperts(made, functions.experts.make_experts, ExpertShape(2, 8, (0, 4), torch.float32), CPU)


@pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("quantization", "dtype"), [("none", torch.bfloat16), ("none", torch.float32), ("int8", torch.float32)]
)
def test_offloaded_experts_give_the_same_bits(compiled_functions, tmp_path, quantization, dtype):
    """Two layers of eight experts, with room for five of the sixteen."""
    torch.manual_seed(0)
    cpu = CpuExperts(compiled_functions)
    make = cpu.calls(quantization, 0)["make_experts"]
    shape = ExpertShape(8, 70, (0, 20), dtype)
    expert_bytes = make(shape, CPU).nbytes // 8
    made = ExpertCache(compiled_functions, 5 * -(-expert_bytes // BLOCK_BYTES) * BLOCK_BYTES, tmp_path)
    layers = []
    for _ in range(2):
        resident, offloaded = make(shape, CPU), OffloadedExperts(made, make, shape, CPU)
        for index in range(8):
            gate_up, down = torch.randn(40, 70).to(dtype), torch.randn(70, 20).to(dtype)
            resident.pack(index, gate_up, down)
            offloaded.pack(index, gate_up, down)
        assert offloaded.nbytes == resident.nbytes
        layers.append((resident, offloaded))
    for tokens in (1, 1, 1, 30, 0, 2):
        x, weights = torch.randn(tokens, 70).to(dtype), torch.rand(tokens, 3)
        ids = torch.rand(tokens, 10).argsort(1)[:, :3]  # of ten, the first and the last elsewhere
        for resident, offloaded in layers:
            expected = cpu.experts(x, ids, weights, ExpertMLPs(resident, first=1))
            assert torch.equal(cpu.experts(x, ids, weights, ExpertMLPs(offloaded, first=1)), expected)
    assert made.stats.hits > 0 and made.stats.bytes_read >= made.stats.misses * expert_bytes > 0
