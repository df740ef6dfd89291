"""Experts in a file with some in memory: the same numbers, the last used ones kept, and what went wrong said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from labinfer.errors import UserError
from labinfer.functions.cpu.experts import CpuExperts
from labinfer.functions.expert_arena import ExpertArena, OffloadedExperts
from labinfer.functions.providers import reference_registry
from labinfer.native import compiler

CPU = torch.device("cpu")
SIZE = 1000


def arena(folder: Path, slots: int, experts: int = 0) -> tuple[ExpertArena, list[int]]:
    """With so many experts in its file, which are bytes of their number."""
    made = ExpertArena(slots * SIZE, folder)
    return made, [made.write(torch.full((SIZE,), number, dtype=torch.uint8)) for number in range(experts)]


def numbers(made: ExpertArena, parts) -> list[list[int]]:
    """The experts at the addresses of each part, read at once."""
    slots = made._slots_SB
    found = []
    for addresses, _ in parts:
        rows = [(address - slots.data_ptr()) // SIZE for address in addresses]
        assert all(len(slots[row].unique()) == 1 for row in rows)
        found.append([int(slots[row, 0]) for row in rows])
    return found


def test_arena_gives_experts_in_order_also_more_than_it_has_slots(tmp_path):
    made, positions = arena(tmp_path, slots=4, experts=11)
    parts = numbers(made, made.parts(positions))
    assert [number for part in parts for number in part] == list(range(11))
    assert all(len(part) <= 2 for part in parts)  # half of the slots, the other half is read into
    assert [is_last for _, is_last in made.parts(positions)] == [False] * 5 + [True]


def test_arena_keeps_what_was_used_last(tmp_path):
    made, positions = arena(tmp_path, slots=4, experts=6)  # the first four are in memory
    for wanted in ((0, 1), (4,), (0, 1), (5,), (0, 1)):
        assert sum(numbers(made, made.parts([positions[number] for number in wanted])), []) == list(wanted)
    assert (made.stats.hits, made.stats.misses) == (6, 2)
    assert made.stats.bytes_read == 2 * SIZE
    numbers(made, made.parts([positions[2], positions[3]]))
    assert made.stats.misses == 4  # they had to go
    assert made.stats.stall_time > 0


def test_arena_reads_a_layer_in_some_parts_of_like_size(tmp_path):
    made, positions = arena(tmp_path, slots=40, experts=60)
    missing = positions[40:48]
    assert numbers(made, made.parts(missing)) == [[40, 41], [42, 43], [44, 45], [46, 47]]
    assert numbers(made, made.parts(missing)) == [list(range(40, 48))]  # in memory now


def test_arena_survives_a_step_that_ended_early(tmp_path):
    made, positions = arena(tmp_path, slots=4, experts=8)
    for _ in made.parts(positions[4:]):
        break
    assert sum(numbers(made, made.parts(positions)), []) == list(range(8))


def test_arena_without_room_for_two_experts_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--expert-offload has room for 1 experts of 1000 bytes; give 2000 bytes"):
        arena(tmp_path, slots=1, experts=1)


def test_experts_of_two_sizes_are_refused(tmp_path):
    made, _ = arena(tmp_path, slots=4, experts=1)
    with pytest.raises(UserError, match="experts of one size; those of this checkpoint take 1000 and 1200 bytes"):
        made.write(torch.zeros(1200, dtype=torch.uint8))


def test_arena_in_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--expert-offload: no file for experts in"):
        ExpertArena(SIZE, tmp_path / "file")


def test_full_disk_is_refused(tmp_path, monkeypatch):
    made, _ = arena(tmp_path, slots=2)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"ends at 0 bytes \(No space left on device\)"):
        made.write(torch.zeros(SIZE, dtype=torch.uint8))


def test_experts_of_the_reference_cannot_be_offloaded(tmp_path):
    made, functions = ExpertArena(SIZE, tmp_path), reference_registry().select(CPU, torch.float32)
    with pytest.raises(UserError, match="--expert-offload needs the compiled experts"):
        OffloadedExperts(
            made,
            functions.experts.make_experts,
            num_experts=2,
            hidden_size=8,
            columns=4,
            dtype=torch.float32,
            device=CPU,
        )


@pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("quantization", "dtype"), [("none", torch.bfloat16), ("none", torch.float32), ("int8", torch.float32)]
)
def test_offloaded_experts_give_the_same_bits(compiled_functions, tmp_path, quantization, dtype):
    """Two layers of eight experts, with room for five of the sixteen."""
    torch.manual_seed(0)
    cpu = CpuExperts(compiled_functions)
    make = cpu.calls(quantization, 0)["make_experts"]
    shape = {"hidden_size": 70, "columns": 20, "dtype": dtype, "device": CPU}
    expert_bytes = make(num_experts=1, **shape).nbytes
    made = ExpertArena(5 * expert_bytes, tmp_path)
    layers = []
    for _ in range(2):
        resident, offloaded = make(num_experts=8, **shape), OffloadedExperts(made, make, num_experts=8, **shape)
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
            expected = cpu.experts(x, ids, weights, resident, first=1)
            assert torch.equal(cpu.experts(x, ids, weights, offloaded, first=1), expected)
    assert made.stats.hits > 0 and made.stats.bytes_read == made.stats.misses * expert_bytes
