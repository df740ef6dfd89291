"""Answers with drafts are those without, on every layout, for every kind of request and whatever drafts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from layouts import layouts_for
from speculated_requests import KINDS, NUM_ALL, NUM_REQUESTS, make_requests, tell

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.engine.draft_lengths import DraftLengths
from labinfer.engine.ngram_proposer import NgramProposer
from labinfer.engine.sequence import Sequence


@dataclass
class KnownAnswers:
    """Drafts what the answers are known to be, some of the tokens wrong."""

    answers: list[list[list[int]]]
    share: float
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    first: int = 0
    """Number of the request with the key 0."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return list(map(self._propose, sequences, limits))

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        begin = sequence.num_output_tokens
        right = self.answers[self.first + sequence.request.key][sequence.choice][begin : begin + limit]
        return [token if self.draw.random() < self.share else self.draw.randrange(100) for token in right]

    def forget(self, sequences: list[Sequence]) -> None:
        pass


@dataclass
class Failing(KnownAnswers):
    """Drafts so some times, and then raises."""

    calls: int = 0

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("no idea")
        return super().propose(sequences, limits)


@pytest.mark.parametrize("count", [NUM_REQUESTS, pytest.param(NUM_ALL, marks=pytest.mark.slow)])
def test_answers_are_those_without_drafts(group, golden, count):
    directory, prompts, _ = golden
    chosen, params = make_requests(prompts, count)
    for layout in layouts_for(group.size):
        speculation = {"method": "ngram", "num_speculative_tokens": 5}
        flat = {
            "model": str(directory),
            "block_size": 4,
            "num_kv_blocks": 600,
            "speculative_config": speculation,
            **layout,
        }
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        drafts = llm.engine.scheduler.drafts if llm.is_rank0 else None
        if drafts:
            assert isinstance(drafts.proposer, NgramProposer)
            drafts.proposer = None
        plain = llm.generate(chosen, params)
        answers = [[answer.token_ids for answer in output.completions] for output in plain or []]
        proposers = [NgramProposer(1, 4), KnownAnswers(answers, 0.0), KnownAnswers(answers, 1.0), Failing(answers, 0.7)]
        for proposer in proposers:
            if drafts:
                assert llm.report.counts["drafted"] == 0 or proposer is not proposers[0]
                drafts.proposer = proposer
            outputs = llm.generate(chosen, params)
            if not drafts:
                continue
            assert tell(outputs) == tell(plain), (layout, proposer)
            counts = llm.report.counts
            assert counts["drafted"] > 0
            oracle = proposer is proposers[2]
            assert counts["accepted"] > 0 or not oracle
            assert counts["drafter_failures"] == (proposer is proposers[3])
            for output, fields in zip(outputs, params, strict=True):
                assert output.num_drafted_tokens == 0 or (fields.speculate and fields.num_beams == 1)


@pytest.mark.parametrize("count", [len(KINDS), pytest.param(NUM_ALL // 5, marks=pytest.mark.slow)])
def test_answers_of_few_at_a_time_are_those_without_chunks_behind_others(group, golden, count):
    """Stages are idle, so further drafted tokens go behind those that are on their way; blocks are few enough for preemptions."""
    if group.size == 1:
        pytest.skip("one stage is never idle")
    directory, prompts, _ = golden
    chosen, params = make_requests(prompts, count)
    flat = {
        "model": str(directory),
        "block_size": 4,
        "num_kv_blocks": 24,
        "speculative_config": {"num_speculative_tokens": 3},
        "pipeline_parallel_size": group.size,
    }
    llm = LLM.from_options(group, EngineOptions.from_flat(flat))
    drafts = llm.engine.scheduler.drafts if llm.is_rank0 else None
    starts = range(0, count, 3)

    def run(proposer, continuous: bool) -> tuple[list, Counter[str]]:
        outputs, counts = [], Counter()
        for first in starts:
            if drafts:
                drafts.proposer, drafts.continuous = proposer, continuous
                if isinstance(proposer, KnownAnswers):
                    proposer.first = first
            found = llm.generate(chosen[first : first + 3], params[first : first + 3])
            if drafts:
                outputs += found
                counts += llm.report.counts
                proposer = drafts.proposer  # none once it has failed
        return outputs, counts

    plain, _ = run(None, False)
    answers = [[answer.token_ids for answer in output.completions] for output in plain]
    proposers = [NgramProposer(1, 4), KnownAnswers(answers, 0.0), KnownAnswers(answers, 1.0), Failing(answers, 0.7)]
    preemptions = 0
    for proposer in proposers:
        for continuous in (True, False) if proposer is proposers[2] else (True,):
            outputs, counts = run(proposer, continuous)
            if not drafts:
                continue
            assert tell(outputs) == tell(plain), (proposer, continuous)
            preemptions += counts["preemptions"]
            assert (counts["continued"] > 0) == continuous
            assert counts["drafter_failures"] == (proposer is proposers[3])
            if proposer is proposers[1]:
                assert counts["accepted"] < counts["drafted"] / 10
    assert preemptions > 0 or not drafts


def test_lengths_are_chosen_by_times_that_were_measured_on_all_stages(group, golden):
    """Good drafts grow and bad ones end, where the times say that rows cost little; nothing is drafted where they cost much."""
    directory, prompts, _ = golden
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for layout in layouts_for(group.size):
        flat = {
            "model": str(directory),
            "block_size": 4,
            "num_kv_blocks": 600,
            "speculative_config": {"method": "ngram"},
            **layout,
        }
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        drafts = llm.engine.scheduler.drafts if llm.is_rank0 else None
        if drafts:
            measured = [drafts._draft_time(1, 1, count) for count in range(17)]
            assert min(measured) > 0 and max(measured) < 10, (layout, measured)
            drafts.proposer = None
        plain = llm.generate(prompts, params)
        answers = [[answer.token_ids for answer in output.completions] for output in plain or []]
        drafted = []
        for share, row_cost in ((1.0, 0.001), (0.0, 0.001), (1.0, 10.0)):
            if drafts:
                drafts.proposer = KnownAnswers(answers, share)
                drafts._draft_time = lambda steps, rows, count, cost=row_cost: 1.0 + cost * (rows + steps * count)
                drafts._lengths = DraftLengths(max_length=16)
            outputs = llm.generate(prompts, params)
            if drafts:
                assert tell(outputs) == tell(plain), layout
                drafted.append(llm.report.counts["drafted"])
        if drafts:
            assert drafted[0] > len(prompts) * 30, (layout, drafted)
            assert drafted[1] < drafted[0] / 2 and drafted[2] < drafted[0] / 4, (layout, drafted)
