"""Costs of a machine: the slowest rank's seconds, the most bytes and the least memory of its ranks."""

from __future__ import annotations

from random_clusters import make_costs

from labinfer.planner.costs import Points
from labinfer.planner.merge_costs import merge_points, merge_ranks
from labinfer.planner.overheads import Overheads
from labinfer.planner.step_shape import StepShape

SHAPES = (StepShape(8, 800, (), 8), StepShape(4, 100, ((256, 700),), 5))


def test_slowest_rank_counts_whichever_it_is():
    fast, slow = make_costs(1.0), make_costs(0.5, fixed=1e-3)
    for ranks in ([fast, slow], [slow, fast]):
        merged = merge_ranks(ranks)
        for shape in SHAPES:
            expected = slow.step_seconds(shape, {"dense": 3}, is_first=True, is_last=True)
            assert merged.step_seconds(shape, {"dense": 3}, is_first=True, is_last=True) == expected


def test_each_cost_is_the_worst_of_any_rank():
    small = make_costs(memory=100, overheads=Overheads(decode=1e-3))
    large = make_costs(
        memory=200, layer_bytes={"dense": 1 << 21}, kv_bytes={"dense": 1 << 11}, head_bytes=1 << 21, hidden_bytes=4096
    )
    merged = merge_ranks([small, large])
    assert (merged.memory, merged.head_bytes, merged.hidden_bytes) == (100, 1 << 21, 4096)
    assert merged.layer_bytes == {"dense": 1 << 21} and merged.kv_bytes == {"dense": 1 << 11}
    assert merged.overheads.decode == 1e-3 and merged.overheads.lead == Overheads().lead


def test_single_rank_is_the_machine():
    costs = make_costs()
    assert merge_ranks([costs]) == costs


def test_points_of_unlike_sizes_are_compared_at_all_of_them():
    merged = merge_points([Points([1, 3], [1.0, 3.0]), Points([1, 2], [2.0, 2.0])])
    assert merged == Points([1, 2, 3], [2.0, 2.0, 3.0])


def test_savings_are_the_least_of_any_rank():
    most, least = (make_costs(skipped=Points([0, 100], [0.0, seconds])) for seconds in (2e-3, 1e-3))
    assert merge_ranks([most, least]).skipped == least.skipped
