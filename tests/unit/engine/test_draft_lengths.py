"""DraftLengths: lengths against an exhaustive search, and how they follow what was verified."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from scheduler_bench import Bench, RandomProposer

from labinfer.base.plan import BatchPlan, BatchResult
from labinfer.base.rank_stats import StepTimes
from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.draft_lengths import LEAST_GAIN, POSITION_WEIGHT, PRIOR, RETRY_STEPS, RETRY_TOKENS, DraftLengths
from labinfer.engine.round_overheads import BASELINE_EVERY, FORGET_AFTER, MIN_ROUNDS, RoundOverheads

FLAT = StepTimes(sizes=[1, 8, 64], by_stage=[[1.0, 1.1, 1.8]])
"""Rows are nearly free."""
LINEAR = StepTimes(sizes=[1, 8, 64], by_stage=[[1.0, 8.0, 64.0]])
"""Rows cost as much as steps of their own."""


@dataclass(eq=False)
class Named:
    """Stands for a sequence."""

    name: str


def rate(lengths, chances, seconds, num_others, draft_seconds=0.0):
    rows = len(lengths) + num_others
    expected = rows + sum(
        sum(itertools.accumulate(c[:k], float.__mul__)) for k, c in zip(lengths, chances, strict=True)
    )
    return expected / (seconds(rows + sum(lengths)) + max(lengths, default=0) * draft_seconds)


@pytest.mark.parametrize("case", range(40))
def test_lengths_are_as_good_as_any(case):
    draw = random.Random(case)
    lengths = DraftLengths(max_length=4)
    sequences = [Named(str(index)) for index in range(draw.randint(1, 3))]
    for _ in range(draw.randint(0, 30)):
        drafted = draw.randint(1, 4)
        lengths.add_verified(draw.choice(sequences), range(drafted), draw.randint(0, drafted))
    fixed, slope = draw.random(), draw.choice([0.0, 0.05, 0.3, 1.0])
    num_others = draw.randint(0, 4)

    def seconds(rows: int) -> float:
        return fixed + slope * rows

    limits = {sequence: draw.randint(1, 4) for sequence in sequences}
    chosen = lengths.choose(limits, num_others, seconds)
    assert all(0 < count <= limits[sequence] for sequence, count in chosen.items())
    chances = [
        [lengths._rate(sequence).estimate(place.estimate(PRIOR), POSITION_WEIGHT) for place in lengths.positions]
        for sequence in sequences
    ]
    best = max(
        rate(ks, chances, seconds, num_others)
        for ks in itertools.product(*(range(limits[sequence] + 1) for sequence in sequences))
    )
    found = rate([chosen.get(sequence, 0) for sequence in sequences], chances, seconds, num_others)
    without = rate([0] * len(sequences), chances, seconds, num_others)
    assert found == pytest.approx(best if best > LEAST_GAIN * without else without)


def test_time_of_the_drafter_shortens_drafts():
    sequence, counts = Named("one"), []
    for draft_seconds in (0.0, 0.2, 2.0):
        lengths = DraftLengths(max_length=16)
        for _ in range(20):
            lengths.add_verified(sequence, range(16), 12)
        lengths.add_draft_time(draft_seconds * 4, 4)
        counts.append(lengths.choose({sequence: 16}, 0, lambda rows: 1.0 + 0.01 * rows).get(sequence, 0))
    assert counts[0] > counts[1] > counts[2] == 0


def test_sequence_with_bad_drafts_gets_none_beside_one_with_good_ones():
    good, bad = Named("good"), Named("bad")
    lengths = DraftLengths(max_length=8)
    for _ in range(30):
        lengths.add_verified(good, range(4), 4)
        lengths.add_verified(bad, range(4), 0)
    chosen = lengths.choose({good: 8, bad: 8}, 0, lambda rows: 1.0 + 0.1 * rows)
    assert chosen.get(good, 0) >= 3 and bad not in chosen
    lengths.forget([good, bad])
    assert not lengths._sequences


def test_bad_drafts_end_and_come_back_when_they_are_good_again():
    sequence, lengths = Named("one"), DraftLengths(max_length=8)
    seconds = lambda rows: 1.0 + 0.1 * rows  # noqa: E731
    for _ in range(30):
        lengths.add_verified(sequence, range(8), 0)
    drafted = []
    for _ in range(7 * RETRY_STEPS):
        chosen = lengths.choose({sequence: 8}, 0, seconds)
        drafted += chosen.values()
        if chosen:
            lengths.add_verified(sequence, range(chosen[sequence]), 0)
    assert drafted == [RETRY_TOKENS] * 3  # after 1, 2 and 4 times as many steps
    for _ in range(10 * RETRY_STEPS):
        if chosen := lengths.choose({sequence: 8}, 0, seconds):
            lengths.add_verified(sequence, range(chosen[sequence]), chosen[sequence])
    assert lengths.choose({sequence: 8}, 0, seconds)[sequence] >= 3


def test_sequences_without_guesses_leave_probes_to_others():
    silent, other, lengths = Named("silent"), Named("other"), DraftLengths(max_length=8)
    for _ in range(30):
        lengths.add_verified(other, range(8), 0)
    probed = [lengths.choose({silent: 8, other: 8}, 0, lambda rows: float(rows)) for _ in range(4 * RETRY_STEPS)]
    assert [list(chosen) for chosen in probed if chosen] == [[silent], [other]] * 2


def drafted_share(
    share: float,
    times: StepTimes,
    num_sequences: int,
    num_stages: int = 1,
    overhead: Callable[[int], float] | None = None,
) -> float:
    """Drafted tokens for each generated one, in the last part of a run.

    Args:
        overhead: seconds that a step takes beyond ``times``, by its drafted tokens; None for a clock that stands still.
    """
    proposer = RandomProposer(random.Random(0), share, full=True)
    bench = Bench(
        num_blocks=2000,
        num_stages=num_stages,
        times=times,
        proposer=proposer,
        speculative_config=SpeculativeOptions(),
    )
    run = bench.worker.run

    def run_slowly(plan: BatchPlan) -> BatchResult:
        count = max(0, plan.num_samples - len(plan.entries))
        bench.clock.sleep(times.at(0, len(plan.entries)) + times.drafted(0, len(plan.entries), count) + overhead(count))
        return run(plan)

    if overhead is not None:
        bench.worker.run = run_slowly
    for _ in range(2 if overhead is None else 6):
        for _ in range(num_sequences):
            bench.add(3, 100)
        before = bench.scheduler.counts["drafted"]
        bench.finish_all()
    return (bench.scheduler.counts["drafted"] - before) / (100 * num_sequences)


def test_drafts_are_made_where_rows_are_free_and_guesses_good():
    assert drafted_share(0.95, FLAT, 1) > 0.7
    assert drafted_share(0.95, FLAT, 2, num_stages=1) > 0.7


@pytest.mark.parametrize(("share", "times", "num_sequences"), [(0.0, FLAT, 1), (0.95, LINEAR, 1), (0.95, LINEAR, 48)])
def test_nothing_but_probes_is_drafted_where_guesses_are_bad_or_rows_cost(share, times, num_sequences):
    assert drafted_share(share, times, num_sequences) <= 1.5 * RETRY_TOKENS / RETRY_STEPS


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_lengths_follow_what_rounds_take_beyond_the_times_of_a_start(num_sequences):
    probes = 1.5 * RETRY_TOKENS / RETRY_STEPS
    assert drafted_share(0.95, FLAT, num_sequences, overhead=lambda count: 0.0) > 0.7
    assert drafted_share(0.95, FLAT, num_sequences, overhead=lambda count: 2.0 * count) <= probes
    assert drafted_share(0.95, FLAT, num_sequences, overhead=lambda count: 40.0 * (count > 0)) <= probes
    assert drafted_share(0.95, LINEAR, num_sequences, overhead=lambda count: 0.0) <= probes
    assert drafted_share(0.95, LINEAR, num_sequences, overhead=lambda count: 20.0) > 0.7


def test_lengths_that_took_too_long_are_tried_again_some_day():
    overheads = RoundOverheads()
    for _ in range(MIN_ROUNDS):
        overheads.add(1, 0, 1.0)
        overheads.add(1, 4, 9.0)
    assert [overheads.seconds(1, count) for count in (0, 3, 4, 20)] == [1.0, 1.0, 9.0, 9.0]
    assert overheads.seconds(2, 4) == 0.0
    plain = [overheads.needs_baseline_round(1) for _ in range(2 * FORGET_AFTER)]
    assert sum(plain) == FORGET_AFTER / BASELINE_EVERY - 1  # with nothing to compare with any more, none
    assert [overheads.seconds(1, count) for count in (0, 4)] == [1.0, 1.0]


def test_rows_of_drafts_cost_what_was_timed_for_them_with_one_sequence_and_no_less_than_others_with_several():
    times = StepTimes(
        sizes=[1, 8], by_stage=[[1.0, 8.0]], draft_rows=[1, 2, 4, 16], drafts_by_stage=[[1.5, 1.5, 2.5, 8.5]]
    )
    assert [times.drafted(0, 1, count) for count in (0, 1, 3, 9, 15)] == [0.0, 0.0, 1.0, 4.0, 7.0]
    assert times.drafted(0, 2, 3) == 3.0
    assert (
        drafted_share(0.95, StepTimes(sizes=[1], by_stage=[[1.0]], draft_rows=[1, 16], drafts_by_stage=[[1.0, 1.2]]), 1)
        > 0.7
    )


def test_drafts_through_stages_are_chosen_by_the_whole_round():
    times = StepTimes(sizes=[1, 8, 64], by_stage=[[1.0, 1.1, 1.8]] * 3, hop=0.5)
    assert drafted_share(0.95, times, 1, num_stages=3) > 0.7


def test_declined_step_is_not_searched_again_until_something_is_learnt():
    lengths, sequence, asked = DraftLengths(max_length=4), Named("a"), []

    def seconds(rows: int) -> float:
        asked.append(rows)
        return float(rows)

    assert lengths.choose({sequence: 4}, 3, seconds) == {}
    first = len(asked)
    assert first and lengths.choose({sequence: 4}, 3, seconds) == {} and len(asked) == first
    assert lengths.choose({sequence: 4}, 2, seconds) == {} and len(asked) > first
    before = len(asked)
    lengths.add_verified(sequence, range(2), 0)
    assert lengths.choose({sequence: 4}, 2, seconds) == {} and len(asked) > before
