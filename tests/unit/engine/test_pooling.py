"""Requests that are pooled, in the scheduler: they sample nothing and end with one vector. ``Bench`` checks its numbers."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench
from worker_model import VECTOR_SIZE

from labinfer.base.plan import FLOAT_BYTES, POOLINGS
from labinfer.engine.request import AnswerUpdate, FinishReason

MIX = [(1, "mean"), (30, "last"), (7, ""), (16, "mean"), (5, ""), (64, "mean"), (3, "last"), (12, "")]


def entries_of(bench: Bench, seq_id: int) -> list:
    return [entry for plan in bench.plans for entry in plan.entries if entry.seq_id == seq_id]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_prompt_goes_through_in_chunks_and_its_vector_comes_with_the_last(pooling, num_stages):
    bench = Bench(num_stages=num_stages, chunked_prefill_size=8)
    sequence = bench.add(20, 1, pooling=pooling)
    advanced = []
    while bench.scheduler.has_work:
        bench.launch_all()
        advanced.append(bench.update())
    assert advanced == [[], [], [sequence]]
    assert [(e.num_tokens, e.num_samples) for e in entries_of(bench, 0)] == [
        (8, 0),
        (8, 0),
        (4, 0),
    ]
    assert [plan.result_bytes > VECTOR_SIZE * FLOAT_BYTES for plan in bench.plans] == [False, False, True]
    assert bench.plans[0].starts[0].sampling.pooling == pooling
    ended = AnswerUpdate(index=0, finish_reason=FinishReason.STOP, embedding=sequence.embedding, queue_seconds=0.0)
    assert sequence.update() == ended
    assert not sequence.is_decoding
    bench.check_end()


@pytest.mark.parametrize("policy", ["balanced", "throttle", "greedy", "phases"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_prompt_of_a_model_that_is_not_causal_goes_through_in_one_step(policy, num_stages):
    """In any order of lengths, with prompts as long as a step, and KV blocks for one of these only."""
    bench = Bench(
        num_blocks=128,
        num_stages=num_stages,
        batch_policy=policy,
        max_num_batched_tokens=512,
        chunked_prefill_size=8,
        is_causal=False,
    )
    lengths = [320, 512, 1, 240, 512, 7, 264, 256, 5, 512] * 2
    for length in lengths:
        bench.add(length, 1, shared=length, pooling="mean")
    bench.finish_all()
    assert [[e.num_tokens for e in entries_of(bench, seq_id)] for seq_id in range(len(lengths))] == [
        [length] for length in lengths
    ]
    assert bench.scheduler.counts["found"] == 0


@pytest.mark.parametrize("policy", ["balanced", "throttle", "greedy"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_long_prompt_of_a_model_that_is_not_causal_is_not_held_back(policy, num_stages):
    """By shorter ones, and all stages have one."""
    bench = Bench(
        num_blocks=1000, num_stages=num_stages, batch_policy=policy, max_num_batched_tokens=512, is_causal=False
    )
    long = [bench.add(500, 1, pooling="last") for _ in range(num_stages)]
    short = [bench.add(20, 1, pooling="last") for _ in range(30)]
    bench.launch_all()
    assert len(bench.scheduler.in_flight) == num_stages
    for _ in range(num_stages):
        bench.update()
    assert all(sequence.embedding is not None for sequence in long)
    bench.finish_all()
    assert all(sequence.embedding is not None for sequence in short)


@pytest.mark.parametrize("policy", ["balanced", "throttle", "greedy", "phases"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [17, 40])
def test_beside_requests_that_generate_all_of_them_end(policy, num_stages, num_blocks):
    """The longest request (64 + 3 tokens) needs 17 blocks of 4."""
    bench = Bench(
        num_blocks=num_blocks,
        num_stages=num_stages,
        batch_policy=policy,
        max_num_batched_tokens=20,
        chunked_prefill_size=8,
    )
    for prompt_tokens, pooling in MIX * 2:
        bench.add(prompt_tokens, 3, pooling=pooling)
    bench.finish_all()
    assert [s.num_output_tokens for s in bench.sequences] == [0 if pooling else 3 for _, pooling in MIX * 2]
    assert [s.embedding is not None for s in bench.sequences] == [bool(pooling) for _, pooling in MIX * 2]


def test_prompt_on_its_way_to_a_vector_is_no_decode():
    """Three that generate make two decodes for each of two micro-batches, however many are pooled beside them."""
    bench = Bench(num_stages=2, max_num_batched_tokens=64, batch_policy="balanced")
    for _ in range(3):
        bench.add(1, 20)
    bench.launch()
    bench.update()
    for _ in range(4):
        bench.add(4, 1, pooling="last")
    first, second = bench.launch_all()
    assert [entry.num_samples for entry in first.entries] == [1, 1, 0, 0, 0, 0]
    assert [entry.num_samples for entry in second.entries] == [1]
    bench.update()
    bench.finish_all()


@pytest.mark.parametrize(("pooling", "begins"), [("last", [16]), ("mean", [0])])
def test_only_the_last_tokens_vector_is_looked_up(pooling, begins):
    """All 20 tokens are in the cache; the last block is run again, as its last token has to be."""
    bench = Bench(max_num_batched_tokens=64)
    bench.add(20, 1, shared=20)
    bench.finish_all()
    sequence = bench.add(20, 1, shared=20, pooling=pooling)
    bench.finish_all()
    assert [entry.begin for entry in entries_of(bench, 1)] == begins
    assert sequence.num_cached_tokens == sequence.update().num_cached_tokens == begins[0]


@pytest.mark.parametrize(("pooling", "num_run"), [("last", 8), ("mean", 20)])
def test_what_others_compute_meanwhile_is_shared_only_for_the_last_tokens_vector(pooling, num_run):
    """The older one has run 16 tokens when the younger one, which got the rest of the first step, goes on."""
    bench = Bench(max_num_batched_tokens=12, chunked_prefill_size=8)
    bench.add(20, 1, shared=20)
    bench.add(20, 1, shared=20, pooling=pooling)
    bench.finish_all()
    assert sum(entry.num_tokens for entry in entries_of(bench, 1)) == num_run


def test_what_a_mean_has_run_can_be_found_by_others():
    bench = Bench(max_num_batched_tokens=64)
    bench.add(20, 1, shared=20, pooling="mean")
    bench.finish_all()
    later = bench.add(20, 1, shared=20)
    bench.finish_all()
    assert later.num_cached_tokens == 16


def preempted_in_its_prompt(pooling: str, **options) -> Bench:
    """The older request needs blocks when 10 of the younger one's 16 tokens have run."""
    bench = Bench(num_blocks=6, block_size=4, chunked_prefill_size=2, **options)
    bench.add(7, 9)
    bench.add(16, 1, pooling=pooling)
    bench.finish_all()
    assert bench.sequences[1].num_preemptions == bench.scheduler.counts["preemptions"] == 1
    return bench


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted_it_is_started_anew(pooling):
    bench = preempted_in_its_prompt(pooling)
    assert sum(start.seq_id == 1 for plan in bench.plans for start in plan.starts) == 2


@pytest.mark.parametrize(("pooling", "swaps"), [("last", 1), ("mean", 0)])
def test_mean_is_never_swapped_as_its_sum_is_forgotten(pooling, swaps):
    bench = preempted_in_its_prompt(pooling, num_host_blocks=10, preemption_mode="swap")
    assert bench.scheduler.counts["swaps"] == swaps
    begins = [entry.begin for entry in entries_of(bench, 1)]
    assert begins == ([*range(0, 16, 2)] if swaps else [*range(0, 10, 2), *range(0, 16, 2)])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_abort_in_flight_drops_the_vector(pooling):
    bench = Bench(num_stages=2)
    aborted, other = bench.add(9, 1, pooling=pooling), bench.add(4, 5)
    bench.launch_all()
    bench.scheduler.finish(aborted, FinishReason.ABORT)
    assert bench.update() == [other]
    assert (aborted.embedding, aborted.finish_reason) == (None, FinishReason.ABORT)
    bench.finish_all()
