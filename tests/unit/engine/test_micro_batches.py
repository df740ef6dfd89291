"""How many micro-batches are in flight, for step times as different machines have them."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from labinfer.base.rank_stats import StepTimes
from labinfer.engine.micro_batches import MicroBatchCount

SIZES = [1, 8, 64]
LINEAR = [0.001 * size for size in SIZES]
FLAT = [0.010, 0.010, 0.0101]


def count(of_stage, num_decoding=64, hop=0.0, has_prompts=False, fixed=0) -> int:
    return MicroBatchCount(len(of_stage), StepTimes(sizes=SIZES, by_stage=of_stage, hop=hop), fixed).best(
        num_decoding, has_prompts
    )


def test_times_lie_on_straight_lines_through_what_was_measured():
    times = StepTimes(sizes=SIZES, by_stage=[[1.0, 8.0, 22.0]])
    assert [times.at(0, size) for size in (1, 4.5, 8, 36, 64, 120)] == [1.0, 4.5, 8.0, 15.0, 22.0, 36.0]
    assert StepTimes(sizes=[1], by_stage=[[3.0]]).at(0, 5) == 3.0
    assert (
        StepTimes(sizes=[1, 8], by_stage=[[3.0, 2.0]]).at(0, 100) == 3.0
    )  # a larger batch is not faster, whatever was measured
    assert times.per_token == 22 / 64


def test_equal_stages_get_one_each():
    assert count([LINEAR] * 2) == 2
    assert count([LINEAR] * 4) == 4
    assert count([LINEAR]) == 1


def test_one_stage_has_one_whatever_was_measured():
    """A time that was measured under load would have it take half of the sequences at once."""
    assert count([[0.001, 0.003, 0.064]], num_decoding=8) == 1
    assert count([[0.001, 0.008, 0.3]]) == 1


def test_stages_that_lend_their_cores_have_one_where_it_is_faster():
    """Weights are read once for all sequences, by all cores, where two micro-batches would read them twice at half the rate."""
    together, alone = [[0.010, 0.011, 0.016]] * 2, [[0.005, 0.0055, 0.008]] * 2
    for num_decoding, has_prompts, best in ((8, False, 1), (32, False, 1), (32, True, 2)):
        times = StepTimes(sizes=SIZES, by_stage=together, alone=alone)
        assert MicroBatchCount(2, times).best(num_decoding, has_prompts) == best
    assert MicroBatchCount(2, StepTimes(sizes=SIZES, by_stage=together)).best(32, False) == 2
    assert (
        MicroBatchCount(2, StepTimes(sizes=SIZES, by_stage=together, alone=[[0.009, 0.0099, 0.0144]] * 2)).best(
            32, False
        )
        == 2
    )


def test_where_a_step_costs_the_same_for_any_number_a_slow_stage_is_not_entered_twice():
    assert count([[3 * t for t in FLAT], FLAT]) == 1
    assert count([[3 * t for t in LINEAR], LINEAR]) == 2


def test_slow_hops_are_hidden_by_more():
    assert count([LINEAR] * 2, hop=0.020) > 2
    assert count([LINEAR] * 2, hop=0.0001) == 2


def test_there_are_no_more_than_sequences():
    assert count([LINEAR] * 2, hop=1.0, num_decoding=3) <= 3
    assert count([LINEAR] * 4, num_decoding=1) == 4  # empty ones are not launched


def test_prompts_want_every_stage():
    assert count([[3 * t for t in FLAT], FLAT], has_prompts=True) == 2


def test_flag_overrules_what_was_measured():
    assert count([LINEAR] * 2, hop=0.020, fixed=1) == 1
    assert MicroBatchCount(3).best(10, False) == 3


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_scheduler_keeps_so_many_in_flight(schedule):
    times = StepTimes(sizes=SIZES, by_stage=[LINEAR, LINEAR], hop=0.020)
    bench = Bench(num_blocks=512, num_stages=2, times=times, pipeline_schedule=schedule, batch_policy="balanced")
    for _ in range(64):
        bench.add(1, 30)
    depths = set()
    for _ in range(40):
        bench.launch_all()
        depths.add(len(bench.scheduler.in_flight))
        bench.update()
    assert max(depths) == count([LINEAR] * 2, hop=0.020)
    bench.finish_all()


@pytest.mark.parametrize(("stage", "expected"), [(0, 1.5), (1, 6.0), (None, 0.0)])
def test_the_rank_that_drafts_runs_the_steps_of_its_stage(stage, expected):
    """A round of 2 micro-batches of 4 sequences, each with 4 drafted tokens, by the times of 8."""
    times = StepTimes(sizes=[4, 8], by_stage=[[1.0, 1.5], [4.0, 6.0]])
    assert MicroBatchCount(2, times, drafting_stage=stage).drafting_step_time(2, 8, 4) == expected
