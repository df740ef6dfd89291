"""Sums and gathers over shared memory, at whatever world size and under whatever launcher these tests were started."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from labinfer.base.errors import WaitTimeout
from labinfer.comm.shared_memory import SLOT_BYTES, share_memory
from labinfer.native import compiler


@pytest.fixture
def comm(group):
    if group.size == 1:
        pytest.skip("needs two ranks")
    if not any(map(shutil.which, compiler.COMPILERS)):
        pytest.skip("no C++ compiler, so no memory is shared either")
    shared = share_memory(group.comm.split([range(group.size)]))
    assert shared.name == "shared memory"
    return shared


def parts_of(comm, size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """What every rank brings, known to all."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(comm.size)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3, 20_001, SLOT_BYTES // 4, 3 * SLOT_BYTES // 2 + 5])
def test_sums_are_in_the_order_of_ranks_and_rounded_once(comm, size, dtype):
    parts = parts_of(comm, size, dtype, seed=1)
    parts[0][0], parts[-1][1] = float("nan"), float("inf")
    for part in parts:
        part[2] = -0.0
    exact = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        exact += part.float()
    result = comm.all_reduce(parts[comm.rank].clone())
    assert result[0].isnan() and torch.equal(bits(result[1:]), bits(exact.to(dtype)[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_what_is_larger_than_a_slot_goes_in_pieces(comm, dtype):
    sizes = [SLOT_BYTES // 8 * (3 - rank % 3) + rank for rank in range(comm.size)]
    mine = torch.full((sizes[comm.rank],), comm.rank).to(dtype)
    for root in range(comm.size):
        gathered = comm.gather(mine, sizes, root)
        assert (gathered is None) == (comm.rank != root)
        for rank, part in enumerate(gathered or []):
            assert part.dtype == dtype and part.numel() == sizes[rank] and bool((part == rank).all())
    parts = parts_of(comm, SLOT_BYTES // 2 + 3, torch.float32, seed=2)
    assert all(map(torch.equal, comm.all_gather(parts[comm.rank]), parts))


def test_ranks_that_come_early_and_late_never_mix_their_operations(comm):
    """Every rank dawdles at other times, before some of many operations of all kinds and sizes."""
    plan, dawdle = random.Random(0), random.Random(comm.rank + 1)
    for number in range(400):
        size, call = plan.choice([1, 100, 5000, 60_000]), plan.choice(["sum", "gather", "all_gather"])
        root = plan.randrange(comm.size)
        if dawdle.random() < 0.1:
            time.sleep(dawdle.random() * 0.002)
        mine = torch.full((size,), float(number + 1000 * comm.rank))
        if call == "sum":
            total = sum(number + 1000 * rank for rank in range(comm.size))
            assert bool((comm.all_reduce(mine) == total).all()), number
            continue
        parts = comm.all_gather(mine) if call == "all_gather" else comm.gather(mine, [size] * comm.size, root)
        if dawdle.random() < 0.1:
            time.sleep(dawdle.random() * 0.002)
        for rank, part in enumerate(parts or []):
            assert bool((part == number + 1000 * rank).all()), number


def test_rank_that_never_comes_is_named(comm):
    """What is left of this communicator is of no use, so each rank has one of its own for it."""
    last = comm.size - 1
    if comm.rank != last:
        with pytest.raises(WaitTimeout, match=rf"rank {comm.rank}.* waited 0\.3 s .* for the part of rank {last}"):
            limit, comm.progress.timeout = comm.progress.timeout, 0.3
            try:
                comm.all_reduce(torch.ones(5))
            finally:
                comm.progress.timeout = limit
    comm.split([range(comm.size)]).barrier()


def test_who_waits_long_sleeps(comm):
    last = comm.size - 1
    begin = time.thread_time()
    if comm.rank == last:
        time.sleep(1.0)
    comm.all_reduce(torch.ones(5))
    assert time.thread_time() - begin < 0.15  # of the thread that waits; others finish what was before


def test_memory_has_no_name_that_somebody_would_have_to_remove(comm):
    """It is of those alone who have it mapped, so it goes with them, however they go."""
    comm.all_reduce(torch.ones(5))
    assert not [name for name in os.listdir("/dev/shm") if "labinfer" in name]
    assert [line.rpartition(" ")[2] for line in mapped()] == ["(deleted)"]


def test_memory_goes_with_the_communicator(group):
    assert mapped() == []
    shared = share_memory(group.comm.split([range(group.size)]))
    assert len(mapped()) == (shared.name == "shared memory")
    del shared
    assert mapped() == []


def mapped() -> list[str]:
    """Mappings of segments for sums. A mapping of one page holds idle flags of a test before, which stay."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:labinfer" in line]
    return [line for line in lines if mapped_bytes(line) > os.sysconf("SC_PAGE_SIZE")]


def mapped_bytes(line: str) -> int:
    begin, end = line.split()[0].split("-")
    return int(end, 16) - int(begin, 16)
