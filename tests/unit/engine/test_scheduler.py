"""The scheduler against a pure-Python model of the workers: who runs when, on which blocks, and that all of it ends."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench
from worker_model import token_at

from labinfer.base.plan import BatchResult, EntryResult
from labinfer.engine.request import FinishReason

SCHEDULES = ("1f1b", "gpipe", "lockstep")
MIX = [(1, 5), (30, 3), (7, 12), (16, 1), (5, 9), (64, 4), (3, 3), (12, 8)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_every_request_finishes_with_its_own_tokens(schedule, num_stages):
    bench = Bench(num_stages=num_stages, pipeline_schedule=schedule, max_num_batched_tokens=20, chunked_prefill_size=8)
    for prompt_tokens, max_tokens in MIX:
        bench.add(prompt_tokens, max_tokens)
    bench.finish_all()
    assert [s.num_output_tokens for s in bench.sequences] == [max_tokens for _, max_tokens in MIX]
    assert {s.finish_reason for s in bench.sequences} == {FinishReason.LENGTH}
    assert bench.scheduler.counts["preemptions"] == 0


@pytest.mark.parametrize(("schedule", "limit"), [("1f1b", 3), ("gpipe", 3), ("lockstep", 1)])
def test_no_more_micro_batches_are_in_flight_than_the_schedule_allows(schedule, limit):
    bench = Bench(num_stages=3, pipeline_schedule=schedule)
    for _ in range(9):
        bench.add(4, 6)
        bench.launch()
    assert len(bench.scheduler.in_flight) == limit
    assert bench.launch() is None


def test_max_inflight_overrides_the_number_of_stages():
    bench = Bench(num_stages=2, max_inflight=4)
    for _ in range(9):
        bench.add(4, 6)
        bench.launch()
    assert len(bench.scheduler.in_flight) == 4


def fill(bench, count):
    """One micro-batch for each of ``count`` sequences, until nothing more may start."""
    for _ in range(count):
        bench.add(4, 20)
        assert bench.launch() is not None
    assert bench.launch() is None


def test_1f1b_launches_one_for_each_that_comes_back():
    bench = Bench(num_stages=3, pipeline_schedule="1f1b")
    fill(bench, 3)
    for _ in range(10):
        bench.update()
        assert len(bench.launch_all()) == 1


def test_gpipe_drains_the_pipeline_before_it_fills_it_again():
    bench = Bench(num_stages=3, pipeline_schedule="gpipe")
    fill(bench, 3)
    for _ in range(5):
        for _ in range(2):
            bench.update()
            assert bench.launch() is None
        bench.update()
        assert len(bench.launch_all()) == 3


def test_lockstep_runs_everything_in_one_batch():
    bench = Bench(num_stages=3, pipeline_schedule="lockstep")
    for _ in range(6):
        bench.add(4, 5)
    sizes = []
    while bench.scheduler.has_work:
        sizes += [len(plan.entries) for plan in bench.launch_all()]
        bench.update()
    assert sizes == [6] * 5


def test_long_prompt_goes_through_in_chunks_several_of_them_in_flight():
    bench = Bench(num_stages=3, chunked_prefill_size=8, max_num_batched_tokens=64)
    bench.add(20, 2)
    plans = bench.launch_all()
    assert [[(e.num_tokens, e.num_samples) for e in plan.entries] for plan in plans] == [
        [(8, 0)],
        [(8, 0)],
        [(4, 1)],
    ]
    assert [len(plan.starts) for plan in plans] == [1, 0, 0]
    bench.finish_all()


@pytest.mark.parametrize(("prompt_tokens", "num_chunks"), [(1, 1), (9, 2), (3, 1)])
def test_prompts_last_token_is_no_decode_though_it_may_run_alone(prompt_tokens, num_chunks):
    bench = Bench(chunked_prefill_size=8)
    bench.add(prompt_tokens, 4)
    decodes = []
    while bench.scheduler.has_work:
        decodes += [plan.num_decodes for plan in bench.launch_all()]
        bench.update()
    assert decodes == [0] * num_chunks + [1] * 3


def test_prompts_blocks_are_sent_once():
    bench = Bench(num_stages=3, chunked_prefill_size=8, block_size=4)
    bench.add(20, 2)
    assert [[len(e.new_blocks) for e in plan.entries] for plan in bench.launch_all()] == [[5], [0], [0]]


def test_decoding_sequence_is_in_one_micro_batch_at_a_time():
    bench = Bench(num_stages=4)
    sequence = bench.add(4, 6)
    bench.launch_all()
    bench.update()
    while bench.scheduler.has_work:
        bench.launch_all()
        assert sequence.num_in_flight == 1
        bench.update()


def test_token_budget_is_shared_by_prompts():
    bench = Bench(max_num_batched_tokens=10, chunked_prefill_size=8)
    for _ in range(3):
        bench.add(6, 1)
    assert [[e.num_tokens for e in plan.entries] for plan in bench.launch_all()] == [[6, 4]]
    bench.update()
    assert [e.num_tokens for e in bench.launch().entries] == [2, 6]  # the older one goes on first
    bench.update()
    bench.finish_all()


def test_decodes_go_before_prompts():
    bench = Bench(max_num_batched_tokens=3)
    old = bench.add(2, 9)
    bench.launch()
    bench.update()
    bench.add(50, 1)
    assert [(e.seq_id, e.num_tokens) for e in bench.launch().entries] == [(old.seq_id, 1), (1, 2)]


def test_no_more_sequences_run_than_allowed():
    bench = Bench(max_num_seqs=3)
    for _ in range(7):
        bench.add(2, 4)
    assert len(bench.launch().entries) == 3
    bench.update()
    bench.finish_all()


@pytest.mark.parametrize(("stages", "count", "share"), [(4, 8, 2), (3, 8, 3), (2, 5, 3), (1, 5, 5)])
def test_decodes_are_spread_over_the_micro_batches(stages, count, share):
    bench = Bench(num_stages=stages, pipeline_schedule="1f1b", max_num_batched_tokens=64)
    for _ in range(count):
        bench.add(1, 30)
    for _ in range(3 * stages):  # past the prompts
        bench.launch_all()
        bench.update()
    begin = len(bench.plans)
    for _ in range(4 * stages):
        bench.launch_all()
        bench.update()
    sizes = [len(plan.entries) for plan in bench.plans[begin:]]
    assert max(sizes) == share
    assert sum(sizes) / len(sizes) >= count / stages - 0.5


def test_finished_sequences_are_told_to_the_workers_once():
    bench = Bench(num_stages=2)
    for _ in range(4):
        bench.add(3, 2)
    late = bench.add(3, 6)
    bench.finish_all()
    told = [seq_id for plan in bench.plans for seq_id in plan.finished]
    assert sorted(told) == [0, 1, 2, 3] and late.finish_reason is FinishReason.LENGTH
    assert bench.scheduler.take_finished_ids() == []


def test_end_of_sequence_token_ends_it_unless_ignored():
    eos = token_at(0, 6)  # the third token that sequence 0 samples
    assert eos not in [token_at(1, position) for position in range(4, 14)]
    bench = Bench(eos=(eos,))
    stopped, other = bench.add(4, 10), bench.add(4, 10)
    bench.finish_all()
    assert (stopped.finish_reason, stopped.num_output_tokens) == (FinishReason.STOP, 3)
    assert stopped.output_ids[-1] == eos
    assert (other.finish_reason, other.num_output_tokens) == (FinishReason.LENGTH, 10)
    bench = Bench(eos=(eos,))
    ignoring = bench.add(4, 10, ignore_eos=True)
    bench.finish_all()
    assert (ignoring.finish_reason, ignoring.num_output_tokens) == (FinishReason.LENGTH, 10)


def test_schedule_answers_none_when_there_is_nothing_to_do():
    bench = Bench()
    assert bench.launch() is None and not bench.scheduler.has_work


def test_result_of_another_step_is_refused():
    bench = Bench(num_stages=2)
    bench.add(4, 2)
    plan = bench.launch()
    with pytest.raises(AssertionError, match="step 1 arrived, but step 0 was expected"):
        bench.scheduler.update(BatchResult(plan.step_id + 1, [EntryResult((5,))]))
