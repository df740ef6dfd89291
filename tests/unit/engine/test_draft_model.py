"""The proposer over a draft model: what it runs, what it remembers, and that its KV blocks hold what they should."""

from __future__ import annotations

import random

import pytest
from fake_draft_model import BLOCK, FakeDraftModel
from scheduler_bench import Bench, ListGuide
from worker_model import token_at

from labinfer.base.config import CacheOptions
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.assemble import make_draft_proposer
from labinfer.engine.request import FinishReason, Request
from labinfer.engine.sequence import Sequence


def make_bench(model: FakeDraftModel, max_tokens: int = 64, eos: tuple = (), **options) -> Bench:
    cache = CacheOptions(block_size=BLOCK)
    bench = Bench(block_size=BLOCK, eos=eos, proposer=make_draft_proposer(model, cache, max_tokens, eos), **options)
    bench.proposer = bench.scheduler.drafts.proposer
    return bench


def assert_nothing_left(bench: Bench) -> None:
    tables = bench.proposer.tables
    tables.check_integrity(())
    assert tables.is_idle


def test_sequences_are_drafted_for_together():
    model = FakeDraftModel()
    bench = make_bench(model, chunked_prefill_size=4, max_num_batched_tokens=30)
    for _ in range(3):
        bench.add(3, 9)
    bench.finish_all()
    sizes = [[entry.num_tokens for entry in plan.entries] for plan in model.plans]
    assert sizes[:3] == [[4, 4, 4], [1, 1, 1], [1, 1, 1]]  # the prompts and a token, then drafts
    assert sizes[3] == [2, 2, 2]  # the draft that it has not seen, and the token behind it
    assert bench.scheduler.counts["drafted"] == bench.scheduler.counts["accepted"] > 0
    assert_nothing_left(bench)


@pytest.mark.pairwise
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num_states", [0, 4, 20])
@pytest.mark.parametrize(("num_blocks", "num_draft_blocks"), [(64, 64), (14, 64), (64, 14), (64, 7)])
def test_answers_do_not_depend_on_the_draft_model(num_stages, share, num_blocks, num_draft_blocks, num_states):
    """Through preemptions, and evictions of what it knows, and where its layers keep states."""
    model = FakeDraftModel(num_draft_blocks, share=share, num_states=num_states)
    bench = make_bench(model, num_blocks=num_blocks, num_stages=num_stages, max_num_seqs=5, chunked_prefill_size=5)
    for index in range(9):
        bench.add(7 + index, 20, shared=index % 2 * 6)
    bench.finish_all()  # looks at all tokens
    assert {sequence.num_output_tokens for sequence in bench.sequences} == {20}
    assert bench.scheduler.counts["drafted"] > 30
    assert bench.scheduler.counts["accepted"] > 0 or share == 0.0
    if num_draft_blocks == 7:
        assert bench.proposer.counts["crowded_out"] > 0
    assert_nothing_left(bench)


@pytest.mark.parametrize("num_states", [0, 12])
@pytest.mark.parametrize("share", [0.7, 0.9, 1.0])
@pytest.mark.parametrize("num_draft_blocks", [64, 16])
def test_draft_model_goes_on_behind_tokens_that_are_on_their_way(share, num_draft_blocks, num_states):
    """``FakeDraftModel`` knows what is in its blocks. With states it does so only where all these tokens are certain."""
    model = FakeDraftModel(num_draft_blocks, share=share, num_states=num_states)
    config = SpeculativeOptions(num_speculative_tokens=4)
    bench = make_bench(model, num_blocks=24, num_stages=4, chunked_prefill_size=12, speculative_config=config)
    for index in range(3):
        bench.add(7 + index, 30)
        bench.finish_all()
    for index in range(2):
        bench.add(7 + index, 30)
    bench.finish_all()
    counts = bench.scheduler.counts
    assert bench.num_behind > (3 if num_states else 20) and counts["accepted"] > 30
    assert share < 1.0 or counts["accepted"] == counts["drafted"]
    assert_nothing_left(bench)


def test_blocks_of_sequences_that_do_not_ask_go_first():
    bench = Bench(block_size=BLOCK)
    proposer = make_draft_proposer(FakeDraftModel(num_blocks=8), CacheOptions(block_size=BLOCK), 64, ())
    first, second = bench.add(9, 40), bench.add(17, 20)
    bench.launch_all()
    bench.update()
    for sequence, num_evicted in ((first, 0), (first, 0), (second, 1), (first, 2)):
        begin = len(sequence.token_ids)
        drafts = proposer.propose([sequence], [4])
        assert drafts == [[token_at(sequence.seq_id, begin + index) for index in range(4)]]
        assert proposer.counts["evicted"] == num_evicted
    proposer.forget([first, second])
    assert proposer.tables.is_idle


def test_long_prompt_is_caught_up_with_step_by_step():
    model = FakeDraftModel()
    bench = make_bench(model, max_tokens=8)
    sequence = bench.add(20, 30)
    bench.launch_all()
    bench.update()
    assert [bench.proposer.propose([sequence], [3]) for _ in range(2)] == [[[]], [[]]]
    assert len(bench.proposer.propose([sequence], [3])[0]) == 3
    assert [plan.num_tokens for plan in model.plans] == [8, 8, 5, 1, 1]
    bench.finish_all()
    assert_nothing_left(bench)


def test_nothing_is_drafted_beyond_the_draft_model_s_context():
    model = FakeDraftModel(max_model_len=12)
    bench = make_bench(model)
    bench.add(6, 30)
    bench.finish_all()
    assert max(entry.begin + entry.num_tokens for plan in model.plans for entry in plan.entries) == 12
    assert_nothing_left(bench)


def test_draft_ends_before_a_token_that_ends_the_answer():
    eos = token_at(0, 8)
    model = FakeDraftModel()
    bench = make_bench(model, eos=(eos,))
    sequence = bench.add(5, 20)
    bench.launch_all()
    bench.update()
    assert bench.proposer.propose([sequence], [9]) == [[token_at(0, 6), token_at(0, 7)]]
    bench.finish_all()
    assert sequence.finish_reason is FinishReason.STOP
    assert_nothing_left(bench)


def test_drafts_keep_to_the_form_of_the_answer():
    form = [token_at(0, index) for index in range(5, 17)]
    guide = ListGuide(form)
    model = FakeDraftModel()
    bench = make_bench(model)
    sequence = bench.add(5, 30, guide=guide)
    bench.finish_all()
    assert (sequence.output_ids, sequence.finish_reason) == (form, FinishReason.STOP)
    sampled = [entry for plan in model.plans for entry in plan.entries if entry.num_samples]
    assert sampled and all(entry.masks for entry in sampled)
    assert guide.tokens == form
    assert_nothing_left(bench)


def test_sampling_of_a_sequence_is_that_of_its_drafts():
    model = FakeDraftModel()
    bench = make_bench(model)
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, seed=11, repetition_penalty=1.3, logprobs=3)
    bench.add_request(Request(key=0, prompt_token_ids=[1] * 5, sampling=sampling))
    sequence: Sequence = bench.sequences[0]
    bench.finish_all()
    (start,) = [start for plan in model.plans for start in plan.starts]
    assert start.sampling.temperature == 0.7 and start.sampling.seed == sequence.token_sampling.seed
    assert start.sampling.processors == sequence.token_sampling.processors != []


@pytest.mark.parametrize("num_states", [0, 9])
def test_random_steps_leave_no_block_behind(num_states):
    draw = random.Random(7)
    model = FakeDraftModel(num_blocks=30, share=0.7, draw=draw, num_states=num_states)
    bench = make_bench(model, num_blocks=40, max_num_seqs=6)
    for _ in range(1500):
        bench.step_at_random(draw)
        bench.proposer.tables.check_integrity(item.cache for item in bench.proposer._drafted.values())
    bench.finish_all()
    assert bench.scheduler.counts["accepted"] > 500
    assert_nothing_left(bench)
