"""KV blocks of layouts as a start counts them: ranks in one memory share all of it, and a plan keeps a reserve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from random_clusters import make_cluster, make_costs, make_problem

from labinfer.base.errors import UserError
from labinfer.engine.cache_capacity import BlockCounts
from labinfer.planner.merge_costs import merge_ranks
from labinfer.planner.objective import RESERVE, EngineLimits, Stage, kv_blocks, kv_tokens
from labinfer.planner.saved_plan import SavedPlan

MIB = 1 << 20
LIMITS = EngineLimits(max_model_len=1 << 20, max_num_seqs=64, block_size=16)
BLOCK = 16 << 10
"""Bytes of a block of a layer; its weights take 1 MiB, and so does each end of the model."""


def make_stages(sizes: Sequence[int], machines: str, **changes) -> list[Stage]:
    costs, stages = make_costs(memory=100 * MIB, **changes), []
    for machine, size in zip(machines, sizes, strict=True):
        begin = stages[-1].end if stages else 0
        stages.append(Stage(machine=machine, costs=costs, begin=begin, end=begin + size))
    return stages


def count(room: int, num_layers: int) -> int:
    """Blocks of so many layers in this room for caches."""
    return int(room * (1 - RESERVE)) // (num_layers * BLOCK)


def test_reserve_is_small_enough_for_nearly_the_best_room():
    """A start by a plan is to have 95 % of what there could be."""
    assert 0.01 <= RESERVE <= 0.03


@pytest.mark.parametrize(
    ("sizes", "sharing", "of_rank"),
    [
        ((6, 2), 1, (count(93 * MIB, 6), count(97 * MIB, 2))),
        ((6, 2), 2, (count(190 * MIB, 8),) * 2),
        ((6, 2), 4, (count(390 * MIB, 8),) * 2),  # two spare ranks
        ((8,), 2, (count(190 * MIB, 8),)),
    ],
)
def test_ranks_in_one_memory_share_all_of_it(sizes, sharing, of_rank):
    stages = make_stages(sizes, "a" * len(sizes), sharing=sharing)
    blocks = kv_blocks(stages, LIMITS)
    assert blocks.of_rank == of_rank and blocks.num_blocks == min(of_rank)
    assert 16 * blocks.num_blocks >= kv_tokens(stages, LIMITS)


def test_each_machine_has_its_own_memory():
    assert kv_blocks(make_stages((6, 2), "ab"), LIMITS).of_rank == (count(93 * MIB, 6), count(97 * MIB, 2))
    three = kv_blocks(make_stages((3, 3, 2), "aab", sharing=2), LIMITS)
    assert three.of_rank == (count(193 * MIB, 6),) * 2 + (count(197 * MIB, 2),)


def test_tensor_parallel_ranks_take_as_much_each():
    costs = {"tp_size": 2, "sharing": 2}
    assert kv_blocks(make_stages((8,), "a", **costs), LIMITS).of_rank == (count(180 * MIB, 16),)


def test_unequal_parts_of_ranks_in_one_memory_count_on_average():
    """As with heads that do not divide by the ranks."""
    small, large = (make_costs(memory=100 * MIB, tp_size=2, sharing=2, kv_bytes={"dense": size}) for size in (0, 2048))
    costs = merge_ranks([small, large])
    assert costs.kv_bytes == {"dense": 2048}
    for sharing, num_blocks in ((2, count(180 * MIB, 16)), (1, count(90 * MIB, 16))):
        own = msgspec.structs.replace(costs, sharing=sharing)
        stage = Stage(machine="a", costs=own, begin=0, end=8)
        assert kv_blocks([stage], LIMITS).num_blocks == num_blocks


def test_no_more_blocks_are_told_than_can_be_filled_or_are_asked_for():
    stages = make_stages((8,), "a")
    short = EngineLimits(max_model_len=160, max_num_seqs=4, block_size=16)
    assert kv_blocks(stages, short).num_blocks == 40
    assert kv_blocks(stages, EngineLimits(max_model_len=160, max_context=320, max_num_seqs=4)).num_blocks == 80
    assert kv_blocks(stages, EngineLimits(max_model_len=160, max_num_seqs=4, num_kv_blocks=7)).num_blocks == 7


@pytest.mark.parametrize(("sizes", "sharing", "room"), [((8,), 1, 90), ((6, 2), 1, 93), ((6, 2), 2, 190)])
def test_blocks_that_are_asked_for_have_room_or_are_refused(sizes, sharing, room):
    """They may take all memory, whatever --memory-utilization says."""
    stages = make_stages(sizes, "a" * len(sizes), sharing=sharing)
    most = count(room * MIB, 8 if sharing > 1 else sizes[0])
    limits = EngineLimits(max_model_len=160, num_kv_blocks=most, memory_utilization=0.5)
    assert kv_blocks(stages, limits).num_blocks == most
    told = int(room * (1 - RESERVE))
    with pytest.raises(UserError, match=f"--num-kv-blocks 10000000 needs [0-9]+ MiB on a, but {told} MiB are free"):
        kv_blocks(stages, replace(limits, num_kv_blocks=10_000_000))
    with pytest.raises(UserError, match=f"needs {told} MiB on a, but {told} MiB"):
        kv_blocks(stages, replace(limits, num_kv_blocks=most + 1))


def test_plan_with_more_blocks_than_fit_is_refused():
    problem = make_problem(make_cluster(1.0, memory=1 << 30), limits=replace(LIMITS, num_kv_blocks=10_000_000))
    stage = Stage(machine="a", costs=problem.cluster.machines[0].costs[0], begin=0, end=8)
    with pytest.raises(UserError, match="--num-kv-blocks 10000000 needs"):
        SavedPlan.make([stage], problem)


@pytest.mark.parametrize(
    ("planned", "num_blocks", "num_window_blocks", "gain"),
    [(0, 200, 60, 2.0), (150, 150, 60, 1.5), (90, 90, 0, 0.9), (300, 200, 60, 2.0)],
)
def test_counts_are_capped_with_the_blocks_of_windowed_layers(planned, num_blocks, num_window_blocks, gain):
    blocks = BlockCounts(of_rank=(200, 240), num_window_blocks=60, whole=100).capped(planned)
    assert (blocks.num_blocks, blocks.num_window_blocks, blocks.gain) == (num_blocks, num_window_blocks, gain)


def test_blocks_that_are_asked_for_are_not_capped_by_a_plan_of_as_many():
    blocks = BlockCounts(of_rank=(100, 100), num_window_blocks=60, whole=100)
    assert blocks.capped(100) == blocks
