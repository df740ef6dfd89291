"""Drafted tokens in the scheduler: how many are run, what becomes of them, and that no answer depends on them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import pytest
from scheduler_bench import VOCAB_SIZE, Bench, FixedProposer, ListGuide, RandomProposer
from worker_model import WRONG_TOKEN, token_at

from labinfer.base.sampling_params import SamplingParams
from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.guide import allows
from labinfer.engine.request import FinishReason, Request
from labinfer.engine.sequence import Sequence


def decodes(bench: Bench, seq_id: int) -> list[int]:
    """Tokens that each decode of a sequence has run."""
    entries = [entry for plan in bench.plans for entry in plan.entries if entry.seq_id == seq_id]
    return [entry.num_tokens for entry in entries if entry.is_decode]


def test_right_drafts_bring_several_tokens_a_step():
    bench = Bench(proposer=FixedProposer(3))
    sequence = bench.add(5, 9)
    bench.finish_all()
    assert decodes(bench, 0) == [4, 4]  # the first token came with the prompt
    assert (sequence.num_output_tokens, sequence.finish_reason) == (9, FinishReason.LENGTH)
    assert (bench.scheduler.counts["drafted"], bench.scheduler.counts["accepted"]) == (6, 6)


def test_wrong_drafts_cost_steps_nothing_but_tokens():
    bench = Bench(proposer=FixedProposer(3, lambda index: False))
    bench.add(5, 9)
    bench.finish_all()
    assert decodes(bench, 0) == [4, 4, 4, 4, 4, 3, 2, 1]
    assert bench.scheduler.counts["accepted"] == 0


def test_draft_counts_as_far_as_it_is_right():
    bench = Bench(proposer=FixedProposer(4, lambda index: index != 8))
    sequence = bench.add(5, 9)
    bench.launch_all()
    bench.update()
    plan = bench.launch()
    assert plan.entries[0].new_tokens == (token_at(0, 5), token_at(0, 6), token_at(0, 7), WRONG_TOKEN, token_at(0, 9))
    bench.update()
    assert sequence.output_ids == [token_at(0, index) for index in range(5, 9)]
    plan = bench.launch()
    assert (plan.entries[0].begin, plan.entries[0].new_tokens[0]) == (8, token_at(0, 8))
    bench.update()
    bench.finish_all()


def test_draft_never_ends_behind_the_answer():
    bench = Bench(proposer=FixedProposer(50))
    bench.add(5, 3)
    bench.finish_all()
    assert decodes(bench, 0) == [2]  # the last token is sampled, not run


def test_answer_ends_within_a_draft_where_it_would_without():
    eos = token_at(0, 8)
    bench = Bench(eos=(eos,), proposer=RandomProposer(random.Random(0), 1.0))
    sequence = bench.add(5, 20)
    bench.finish_all()
    assert (sequence.finish_reason, sequence.num_output_tokens, sequence.output_ids[-1]) == (FinishReason.STOP, 4, eos)
    assert not any(eos in entry.new_tokens for plan in bench.plans for entry in plan.entries)


def test_drafts_take_what_tokens_decodes_leave():
    bench = Bench(proposer=FixedProposer(9), max_num_batched_tokens=12, chunked_prefill_size=6)
    for _ in range(3):
        bench.add(2, 30)
    bench.launch_all()
    bench.update()
    assert [entry.num_tokens for entry in bench.launch().entries] == [6, 5, 1]
    bench.update()
    bench.finish_all()


def test_nobody_is_preempted_for_a_draft():
    bench = Bench(num_blocks=6, block_size=4, proposer=FixedProposer(8))
    for _ in range(3):
        bench.add(7, 2)  # two blocks each, which are all there are
    bench.finish_all()
    assert bench.scheduler.counts["preemptions"] == 0


def test_blocks_of_rejected_tokens_are_free_again():
    bench = Bench(num_blocks=20, block_size=4, proposer=FixedProposer(10, lambda index: False))
    bench.add(4, 30)
    bench.launch_all()
    bench.update()
    bench.launch()
    assert bench.blocks.num_free == 16
    bench.update()
    assert bench.blocks.num_free == 18
    bench.finish_all()


@pytest.mark.parametrize("rejected", [False, True])
def test_drafted_tokens_cannot_be_found_in_the_cache(rejected):
    proposer, one_chunk = FixedProposer(11, lambda index: False), SpeculativeOptions(continuous=False)
    bench = Bench(block_size=4, num_stages=2, proposer=proposer, speculative_config=one_chunk)
    sequence = bench.add(4, 30)
    bench.launch_all()
    bench.update()
    bench.launch()
    prompt = [*sequence.token_ids, *sequence.draft]
    assert len(prompt) == 16
    if rejected:
        bench.update()
    bench.add_request(Request(key=1, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1)))
    bench.launch_all()
    assert bench.plans[-1].starts[0].seq_id == 1
    assert bench.sequences[1].num_cached_tokens == 4  # the other one's prompt
    bench.finish_all()


@dataclass
class FailingProposer(FixedProposer):
    """Drafts well at first, and then does what no drafter should."""

    failure: str = "raises"

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        drafts = super().propose(sequences, limits)
        if len(sequences[0].token_ids) < 20:
            return drafts
        if self.failure == "raises":
            raise ArithmeticError("no guess\nat all")
        if self.failure == "missing":
            return drafts[1:]
        drafts[0][0] = {"vocabulary": VOCAB_SIZE, "negative": -1, "float": 3.0, "none": None}[self.failure]
        return drafts

    def forget(self, sequences: list[Sequence]) -> None:
        if self.failure == "forget":
            raise KeyError("who is that")


@pytest.mark.parametrize("failure", ["raises", "missing", "vocabulary", "negative", "float", "none", "forget"])
def test_proposer_that_fails_is_named_once_and_not_asked_again(failure, caplog):
    bench = Bench(proposer=FailingProposer(3, failure=failure))
    first, second = bench.add(5, 30), bench.add(5, 40)
    bench.finish_all()
    assert (first.num_output_tokens, second.num_output_tokens) == (30, 40)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "FailingProposer failed: " in record.getMessage() and "\n" not in record.getMessage()
    assert failure != "raises" or record.getMessage().endswith("ArithmeticError: no guess")
    if failure in ("raises", "forget"):
        assert re.search(r"failed: .*test_drafts.py, line [0-9]+: [A-Z]", record.getMessage())
    counts = bench.scheduler.counts
    assert counts["drafter_failures"] == 1 and counts["drafted"] > 0
    assert bench.scheduler.drafts.proposer is None


@pytest.mark.parametrize("change", [lambda tokens: tokens.append(3), lambda tokens: tokens.pop()])
def test_proposer_that_changes_a_sequence_ends_the_run(change):
    @dataclass
    class Changing(FixedProposer):
        def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
            change(sequences[-1].token_ids)
            return super().propose(sequences, limits)

    bench = Bench(proposer=Changing(3))
    bench.add(5, 30)
    with pytest.raises(AssertionError, match="Changing modified a sequence"):
        bench.finish_all()


def test_draft_that_is_too_long_is_cut():
    @dataclass
    class Generous(FixedProposer):
        def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
            return super().propose(sequences, [limit + 50 for limit in limits])

    bench = Bench(proposer=Generous(50), chunked_prefill_size=8, max_num_batched_tokens=14)
    bench.add(5, 30)
    bench.add(5, 30)
    bench.finish_all()
    assert max(plan.num_tokens for plan in bench.plans if plan.num_decodes) == 14


@pytest.mark.parametrize("kind", [iter, tuple, dict.fromkeys])
def test_drafts_may_be_any_series_of_tokens(kind):
    @dataclass
    class Lenient(FixedProposer):
        def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
            return [kind(draft) for draft in super().propose(sequences, limits)]

    bench = Bench(proposer=Lenient(1))
    bench.add(5, 9)
    bench.finish_all()
    assert bench.scheduler.counts["accepted"] == 4 and not bench.scheduler.counts["drafter_failures"]


def test_prompts_come_before_drafts():
    bench = Bench(proposer=FixedProposer(8), num_blocks=500, max_num_batched_tokens=16)
    for _ in range(4):
        bench.add(4, 60)
    while any(sequence.num_output_tokens < 2 for sequence in bench.scheduler.running) or bench.scheduler.waiting:
        bench.launch_all()
        bench.update()
    late = bench.add(4, 10)
    bench.launch_all()
    assert late in bench.scheduler.running
    assert bench.plans[-1].num_tokens == 16  # drafts have what the prompt leaves
    bench.finish_all()


def test_time_of_the_drafter_is_known_with_several_micro_batches():
    @dataclass
    class Slow(FixedProposer):
        def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
            bench.clock.now += 0.5
            return super().propose(sequences, limits)

    bench = Bench(proposer=Slow(2), num_stages=2)
    for _ in range(4):
        bench.add(4, 20)
    bench.finish_all()
    assert bench.scheduler.drafts._lengths._draft_seconds > 0.0
    assert not bench.scheduler.drafts._asked_before


def test_request_can_do_without_drafts():
    bench = Bench(proposer=FixedProposer(3))
    prompts = ([-1] * 5, [-2] * 5)
    for key, speculate in enumerate((True, False)):
        sampling = SamplingParams(max_tokens=9, speculate=speculate)
        bench.add_request(Request(key=key, prompt_token_ids=prompts[key], sampling=sampling))
    bench.finish_all()
    assert decodes(bench, 0) == [4, 4] and decodes(bench, 1) == [1] * 8


def test_places_of_drafts_are_counted():
    bench = Bench(proposer=FixedProposer(3, lambda index: index % 4 != 3))
    bench.add(5, 9)  # drafts of 6 7 | 8 9 10 | 12 13 …: those at 7 and 11 are wrong
    bench.finish_all()
    counts = bench.scheduler.counts
    assert counts["drafted"] == sum(counts[f"drafted_{place}"] for place in range(3))
    assert counts["accepted"] == sum(counts[f"accepted_{place}"] for place in range(3)) > 0
    assert counts["drafts"] == counts["drafted_0"] >= counts["accepted_0"] > counts["accepted_2"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_nothing_is_drafted_for_pooled_prompts_and_beams(pooling):
    bench = Bench(proposer=FixedProposer(3))
    bench.add(5, 1, pooling=pooling)
    bench.add(5, 8, num_beams=2)
    bench.finish_all()
    assert bench.scheduler.counts["drafted"] == 0


def test_layers_with_a_state_run_right_tokens_again_behind_wrong_ones():
    """With the next drafts, from the state before the chunk that went wrong."""
    bench = Bench(num_states=4, snapshot_interval=100, proposer=FixedProposer(3, lambda index: index != 8))
    bench.add(5, 9)
    bench.finish_all()
    assert [(entry.begin, entry.num_tokens, entry.num_samples) for plan in bench.plans for entry in plan.entries] == [
        (0, 4, 0),
        (4, 1, 1),
        (5, 4, 4),  # the tokens at 6 and 7 are right, the one at 8 is not
        (5, 7, 4),  # those from 5 to 8, and three drafts
        (12, 1, 1),
    ]
    assert (bench.scheduler.counts["drafted"], bench.scheduler.counts["accepted"]) == (6, 5)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "room",
    [
        {"num_blocks": 200, "num_states": 16},
        {"num_blocks": 12, "num_states": 7, "num_host_blocks": 30, "num_host_states": 3, "preemption_mode": "swap"},
        {"num_blocks": 12, "num_states": 5, "max_num_batched_tokens": 7, "chunked_prefill_size": 5},
    ],
    ids=["ample", "swap", "small steps"],
)
def test_states_go_back_to_right_tokens(num_stages, share, caching, room):
    """``WorkerModel`` knows which tokens went into a state."""
    bench = Bench(
        block_size=4,
        num_stages=num_stages,
        proposer=RandomProposer(random.Random(4), share),
        enable_prefix_caching=caching,
        **room,
    )
    for index in range(7):
        bench.add(5 + index, 30, shared=index % 2 * 4)
    bench.finish_all()  # looks at all tokens
    assert {sequence.num_output_tokens for sequence in bench.sequences} == {30}
    assert bench.scheduler.counts["drafted"] > 30
    assert bench.scheduler.counts["preemptions"] > 0 or room["num_blocks"] == 200


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("swap", [{}, {"num_host_blocks": 40, "preemption_mode": "swap"}], ids=["recompute", "swap"])
def test_answers_do_not_depend_on_drafts_through_preemptions(num_stages, share, swap):
    bench = Bench(
        num_blocks=9, block_size=4, num_stages=num_stages, proposer=RandomProposer(random.Random(1), share), **swap
    )
    for _ in range(6):
        bench.add(6, 20)
    bench.finish_all()  # looks at all tokens
    assert bench.scheduler.counts["preemptions"] > 0 and bench.scheduler.counts["drafted"] > 30
    assert {sequence.num_output_tokens for sequence in bench.sequences} == {20}


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_context_is_shifted_between_the_same_tokens_as_without_drafts(share):
    """``WorkerModel`` knows where a token's context begins."""
    bench = Bench(
        num_blocks=40,
        block_size=4,
        max_context=16,
        context_shift=True,
        proposer=RandomProposer(random.Random(2), share),
    )
    for _ in range(3):
        bench.add(6, 60)
    bench.finish_all()
    assert bench.scheduler.counts["drafted"] > 50


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_each_drafted_place_has_its_own_mask(share):
    form = [token_at(0, index) for index in range(5, 17)]
    guide = ListGuide(form)
    bench = Bench(proposer=RandomProposer(random.Random(3), share))
    sequence = bench.add(5, 30, guide=guide)
    while bench.scheduler.has_work:
        (plan,) = bench.launch_all()
        (entry,) = plan.entries
        assert guide.tokens == sequence.output_ids
        assert entry.num_samples == len(entry.masks) == 1 + len(sequence.draft)
        for offset, mask in enumerate(entry.masks):
            assert allows(mask, form[sequence.num_output_tokens + offset])
        bench.update()
    bench.check_end()
    assert (sequence.output_ids, sequence.finish_reason) == (form, FinishReason.STOP)
    assert bench.scheduler.counts["drafted"] > 0 or share < 1.0


def test_resumed_sequence_goes_on_behind_its_tokens():
    bench = Bench(chunked_prefill_size=4, max_num_batched_tokens=4)
    begun = tuple(token_at(0, index) for index in range(5, 9))
    sampling = SamplingParams(max_tokens=9, logprobs=1)
    bench.add_request(Request(key=0, prompt_token_ids=[1] * 5, sampling=sampling, output_token_ids=begun))
    (sequence,) = bench.sequences
    bench.finish_all()
    assert bench.plans[0].starts[0].token_ids == [1] * 5 + list(begun)
    assert bench.plans[0].starts[0].sampling.num_prompt_tokens == 5
    assert sequence.num_output_tokens == 9 and sum(len(update.logprobs) for update in bench.updates[0]) == 5
    assert not sequence.logprobs  # those that were told take no memory


def test_first_update_of_a_resumed_sequence_tells_how_long_it_waited():
    bench = Bench()
    sampling = SamplingParams(max_tokens=4)
    begun = (token_at(0, 5),)
    bench.add_request(Request(key=0, prompt_token_ids=[1] * 5, sampling=sampling, output_token_ids=begun))
    bench.finish_all()
    assert [len(update.token_ids) for update in bench.updates[0]] == [1, 1, 1]
    assert [update.queue_seconds is None for update in bench.updates[0]] == [False, True, True]


def test_tokens_that_a_resumed_sequence_brings_are_no_cached_prompt():
    bench = Bench(block_size=4)
    first = bench.add(6, 12)
    bench.finish_all()
    request = Request(
        key=1,
        prompt_token_ids=first.token_ids[:6],
        sampling=SamplingParams(max_tokens=20),
        output_token_ids=tuple(first.output_ids),
    )
    bench.add_request(request)
    bench.launch()
    assert bench.sequences[1].num_cached_tokens == 6
    bench.scheduler.finish(bench.sequences[1], FinishReason.ABORT)
