"""Drafts of a model on another rank: what is asked for and when, and that no answer depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from fake_draft_model import BLOCK, FakeDraftModel
from scheduler_bench import Bench, ListGuide
from worker_model import token_at

from labinfer.base.config import CacheOptions
from labinfer.base.errors import WaitTimeout
from labinfer.base.plan import DraftAnswer, DraftRequest
from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.assemble import make_draft_proposer
from labinfer.engine.remote_drafts import Drafter, RemoteProposer


@dataclass
class FakeChannel:
    """Hands each request over as bytes, and keeps the answer until it is taken."""

    model: FakeDraftModel
    requests: list[DraftRequest] = field(default_factory=list)
    answer: DraftAnswer | None = None

    def __post_init__(self) -> None:
        self.drafter = Drafter(make_draft_proposer(self.model, CacheOptions(block_size=BLOCK), 64, ()))

    def ask(self, request: DraftRequest) -> None:
        assert self.answer is None, "a request before the answer to the last one was taken"
        self.requests.append(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=DraftRequest))
        self.answer = self.drafter.answer(self.requests[-1])

    def take(self) -> DraftAnswer | None:
        answer, self.answer = self.answer, None
        return answer


def make_bench(channel: FakeChannel, eos: tuple = (), **options) -> Bench:
    return Bench(block_size=BLOCK, eos=eos, proposer=RemoteProposer(channel, eos), **options)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_states", [0, 12])
def test_answers_do_not_depend_on_who_drafts_and_when(num_stages, share, num_states):
    channel = FakeChannel(FakeDraftModel(share=share, num_states=num_states))
    config = SpeculativeOptions(num_speculative_tokens=3)
    bench = make_bench(
        channel, num_stages=num_stages, chunked_prefill_size=8, max_num_seqs=4, speculative_config=config
    )
    for index in range(6):
        bench.add(7 + index, 20, shared=index % 2 * 6)
    bench.finish_all()  # looks at all tokens
    last = bench.add(5, 20)
    bench.finish_all()
    counts = bench.scheduler.counts
    assert counts["drafted"] > 30 and (counts["accepted"] > 0 or share == 0.0)
    assert share < 1.0 or counts["accepted"] == counts["drafted"]
    assert set(channel.model.known) == {last.seq_id}, "it was not told to forget the others"


def test_drafts_of_a_right_guess_are_there_before_they_are_needed():
    channel = FakeChannel(FakeDraftModel())
    bench = make_bench(channel, speculative_config=SpeculativeOptions(num_speculative_tokens=3))
    bench.add(5, 42)
    bench.finish_all()
    decodes = [plan for plan in bench.plans if plan.entries[0].is_decode]
    assert [plan.num_tokens for plan in decodes[:-1]] == [4] * 10
    limits = [request.entries[0].limit for request in channel.requests]
    assert limits[:3] == [3, 4, 4], (
        "only the first draft was waited for; one more token for the one that is sampled last"
    )
    assert len(limits) == len(decodes[:-1]) + 1


def test_wrong_guess_is_waited_for_only_where_nothing_is_on_its_way():
    bench = Bench(block_size=BLOCK)
    first, second = bench.add(5, 20), bench.add(6, 20)
    bench.launch_all()
    bench.update()
    proposer = RemoteProposer(FakeChannel(FakeDraftModel()), ())
    (draft,) = proposer.propose([first], [3])
    assert draft == [token_at(0, index) for index in range(6, 9)]
    first.num_in_flight = 1
    assert proposer.propose([second], [2]) == [[]]
    assert proposer.propose([second], [2]) == [[token_at(1, 7), token_at(1, 8)]]


def test_drafts_are_cut_where_the_form_forbids_them():
    form = [token_at(0, index) for index in range(5, 17)]
    bench = make_bench(FakeChannel(FakeDraftModel()))
    sequence = bench.add(5, 30, guide=ListGuide(form))
    bench.finish_all()
    assert sequence.output_ids == form and bench.scheduler.counts["accepted"] > 5


def test_drafter_that_fails_is_not_asked_again():
    channel = FakeChannel(FakeDraftModel())
    channel.model.run = None
    bench = make_bench(channel)
    bench.add(5, 20)
    bench.finish_all()
    assert bench.scheduler.counts["drafter_failures"] == 1 and len(channel.requests) == 1


def test_rank_that_does_not_answer_ends_the_group():
    def take() -> None:
        raise WaitTimeout("rank 0 waited 2 s for the drafts of rank 2")

    channel = FakeChannel(FakeDraftModel())
    channel.take = take
    bench = make_bench(channel)
    bench.add(5, 20)
    with pytest.raises(WaitTimeout, match="the drafts of rank 2"):
        bench.finish_all()
