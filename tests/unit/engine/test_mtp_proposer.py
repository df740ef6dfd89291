"""Drafts that come with the tokens: asked for a step ahead, in blocks of their own, and no answer depends on them."""

from __future__ import annotations

import random

import msgspec
import pytest
from scheduler_bench import Bench
from worker_model import WRONG_TOKEN, token_at

from labinfer.base.plan import BatchPlan, BatchResult, count_accepted
from labinfer.base.rank_stats import StepTimes
from labinfer.base.speculative_options import MTP, SpeculativeOptions
from labinfer.engine.draft_lengths import RETRY_STEPS, RETRY_TOKENS
from labinfer.engine.mtp_proposer import MTPProposer

FLAT = StepTimes(sizes=[1, 8, 64], by_stage=[[1.0, 1.1, 1.8]])
LINEAR = StepTimes(sizes=[1, 8, 64], by_stage=[[1.0, 8.0, 64.0]])
"""Rows are nearly free, or cost as much as steps of their own."""


class DraftingBench(Bench):
    """A bench whose workers guess, and that checks where the guesses' keys and values would be.

    Args:
        share: tokens that are guessed right.
    """

    def __init__(self, share: float, num_speculative_tokens: int = 0, **options):
        config = SpeculativeOptions(method=MTP, num_speculative_tokens=num_speculative_tokens)
        super().__init__(proposer=MTPProposer(), speculative_config=config, **options)
        self._draw, self._share = random.Random(3), share
        self._run, self.worker.run = self.worker.run, self.run

    def run(self, plan: BatchPlan) -> BatchResult:
        result = self._run(plan)
        entries = []
        for entry, brought in zip(plan.entries, result.entries, strict=True):
            drafted = entry.new_tokens[len(entry.new_tokens) - entry.num_samples + 1 :]
            end = entry.begin + entry.num_tokens - (entry.num_samples - 1 - count_accepted(drafted, brought.token_ids))
            draft = tuple(
                token_at(entry.seq_id, end + 1 + place) if self._draw.random() < self._share else WRONG_TOKEN
                for place in range(entry.num_drafts)
            )
            if entry.num_drafts:
                last = entry.position + entry.num_tokens + entry.num_drafts - 1
                assert entry.num_samples and last <= self.max_context
                assert last <= len(self.worker.sequences[entry.seq_id].block_table) * self.blocks.block_size
            entries.append(msgspec.structs.replace(brought, draft=draft))
        result = BatchResult(result.step_id, entries)
        assert len(result.encode()) <= plan.result_bytes
        return result


def test_right_drafts_bring_several_tokens_a_step():
    bench = DraftingBench(1.0, 3)
    bench.add(5, 21)
    bench.finish_all()
    assert [entry.num_samples for plan in bench.plans for entry in plan.entries] == [1, 4, 4, 4, 4, 4]
    assert bench.scheduler.counts["accepted"] == bench.scheduler.counts["drafted"] == 15


def test_nothing_is_asked_for_behind_the_answer_or_the_context():
    bench = DraftingBench(1.0, 8, max_context=20)
    bench.add(5, 4)
    bench.add(5, 1)
    bench.add(16, 4)
    bench.finish_all()
    asked = {entry.seq_id: entry.num_drafts for plan in bench.plans[:1] for entry in plan.entries}
    assert asked == {0: 2, 1: 0, 2: 2}


def test_fewer_are_asked_for_where_no_block_is_free():
    bench = DraftingBench(1.0, 8, num_blocks=2, max_context=100)
    bench.add(6, 2)
    bench.launch()
    (entry,) = bench.plans[0].entries
    assert entry.num_drafts == 0
    bench = DraftingBench(1.0, 8, num_blocks=2, max_context=100)
    bench.add(6, 12)
    bench.launch()
    (entry,) = bench.plans[0].entries
    assert entry.num_drafts == 3  # the first needs none; two more fit behind the 6 tokens


def asked_share(share: float, times: StepTimes, num_sequences: int) -> float:
    """Guessed tokens for each generated one, in the second half of a run."""
    bench = DraftingBench(share, num_blocks=2000, times=times)
    for _ in range(2):
        for _ in range(num_sequences):
            bench.add(3, 100)
        first = len(bench.plans)
        bench.finish_all()
    return sum(entry.num_drafts for plan in bench.plans[first:] for entry in plan.entries) / (100 * num_sequences)


def test_length_is_chosen_a_step_ahead():
    assert asked_share(0.95, FLAT, 1) > 0.7
    for share, times, num_sequences in [(0.0, FLAT, 1), (0.95, LINEAR, 1), (0.95, LINEAR, 16)]:
        # What became of a draft is known after the next one is asked for: bad ones end a step later than others do.
        assert asked_share(share, times, num_sequences) <= 2 * RETRY_TOKENS / RETRY_STEPS


def test_rounds_that_only_verify_or_only_draft_say_nothing_of_what_rounds_take(monkeypatch):
    times = StepTimes(sizes=[1, 8], by_stage=[[1.0, 8.0]], draft_rows=[1, 2, 16], drafts_by_stage=[[1.0, 1.5, 1.5]])
    bench, samples = DraftingBench(1.0, num_blocks=2000, times=times), []
    run, overheads = bench.worker.run, bench.scheduler.drafts._overheads
    add = overheads.add

    def run_as_timed(plan: BatchPlan) -> BatchResult:
        bench.clock.sleep(1.0 + 0.5 * any(entry.num_drafts for entry in plan.entries))
        return run(plan)

    bench.worker.run = run_as_timed
    monkeypatch.setattr(overheads, "add", lambda *sample: (samples.append(sample), add(*sample)))
    bench.add(3, 300)
    bench.finish_all()
    assert {(drafted > 0, seconds) for _, drafted, seconds in samples} == {(False, 0.0), (True, 0.0)}


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"num_states": 9}, {"num_host_blocks": 20, "preemption_mode": "swap"}])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_random_steps_leave_no_block_behind(options, num_stages):
    draw = random.Random(7)
    bench = DraftingBench(0.7, 4, num_blocks=40, max_num_seqs=6, num_stages=num_stages, **options)
    for _ in range(1500):
        bench.step_at_random(draw)
    bench.finish_all()
    assert bench.scheduler.counts["accepted"] > 300 and bench.scheduler.counts["preemptions"] > 0
