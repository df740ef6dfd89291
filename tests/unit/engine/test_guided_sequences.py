"""Guides in the scheduler: whose mask a plan carries, when an answer ends, and that a mask is made once for a token."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
from scheduler_bench import Bench
from worker_model import token_at

from labinfer.engine.request import FinishReason


@dataclass
class CountingGuide:
    """Its mask says how many tokens have come."""

    length: int = 10**6
    """After so many tokens the answer is complete …"""
    failure: int = -1
    """… or after so many a limit is hit."""
    accepted: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def mask(self) -> bytes:
        return b"" if self.error or len(self.accepted) >= self.length else b"mask %d" % len(self.accepted)

    def accept(self, token: int) -> None:
        assert self.mask, "it has ended"
        self.accepted.append(token)
        if len(self.accepted) == self.failure:
            self.error = "the grammar is too large"


def masks_of(bench: Bench, seq_id: int) -> list[bytes]:
    """Of the entries that sample, in order; no other entry has one."""
    entries = [entry for plan in bench.plans for entry in plan.entries if entry.seq_id == seq_id]
    assert not any(entry.masks for entry in entries if not entry.num_samples)
    return [entry.masks[0] if entry.masks else b"" for entry in entries if entry.num_samples]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_each_entry_that_samples_has_the_mask_of_its_tokens(num_stages):
    bench = Bench(num_stages=num_stages, chunked_prefill_size=8, max_num_batched_tokens=12)
    guides = [CountingGuide(), None, CountingGuide()]
    for prompt_tokens, guide in zip((30, 7, 3), guides, strict=True):
        bench.add(prompt_tokens, 6, guide=guide)
    bench.finish_all()
    assert masks_of(bench, 0) == masks_of(bench, 2) == [b"mask %d" % n for n in range(6)]
    assert masks_of(bench, 1) == [b""] * 6
    assert {sequence.finish_reason for sequence in bench.sequences} == {FinishReason.LENGTH}
    for sequence, guide in zip(bench.sequences, guides, strict=True):
        assert guide is None or guide.accepted == sequence.output_ids


@pytest.mark.parametrize("swap", [{}, {"num_host_blocks": 40, "preemption_mode": "swap"}])
def test_guide_outlives_preemptions(swap):
    bench = Bench(num_blocks=6, block_size=4, **swap)
    guides = [CountingGuide() for _ in range(3)]
    for guide in guides:
        bench.add(7, 9, guide=guide)
    bench.finish_all()
    assert bench.scheduler.counts["preemptions"] > 0
    for sequence, guide in zip(bench.sequences, guides, strict=True):
        assert guide.accepted == sequence.output_ids
        assert masks_of(bench, sequence.seq_id) == [b"mask %d" % n for n in range(9)]


def test_complete_answer_ends_at_once():
    bench = Bench()
    ended, other = bench.add(4, 9, guide=CountingGuide(length=3)), bench.add(4, 9)
    bench.finish_all()
    assert (ended.finish_reason, ended.num_output_tokens) == (FinishReason.STOP, 3)
    assert (other.finish_reason, other.num_output_tokens) == (FinishReason.LENGTH, 9)


def test_answer_that_is_complete_with_its_last_token_is_complete():
    bench = Bench()
    sequence = bench.add(4, 3, guide=CountingGuide(length=3))
    bench.finish_all()
    assert (sequence.finish_reason, sequence.num_output_tokens) == (FinishReason.STOP, 3)


def test_guide_that_fails_ends_its_answer_only_and_says_why(caplog):
    bench = Bench(num_stages=2)
    broken, other = bench.add(4, 9, guide=CountingGuide(failure=2)), bench.add(4, 9)
    with caplog.at_level(logging.WARNING):
        bench.finish_all()
    assert (broken.finish_reason, broken.num_output_tokens) == (FinishReason.ABORT, 2)
    assert (other.finish_reason, other.num_output_tokens) == (FinishReason.LENGTH, 9)
    assert [record.message for record in caplog.records] == [
        "sequence 0 is aborted: structured_outputs became too complex: the grammar is too large"
    ]


def test_token_that_ends_the_answer_is_none_of_the_guides():
    guide = CountingGuide()
    bench = Bench(eos=(token_at(0, 6),))
    sequence = bench.add(4, 9, guide=guide)
    bench.finish_all()
    assert sequence.finish_reason is FinishReason.STOP
    assert guide.accepted == sequence.output_ids[:-1] and sequence.output_ids[-1] == token_at(0, 6)


def test_token_of_an_aborted_answer_does_not_reach_its_guide():
    guide = CountingGuide()
    bench = Bench(num_stages=2)
    sequence = bench.add(4, 9, guide=guide)
    bench.launch_all()
    bench.scheduler.finish(sequence, FinishReason.ABORT)
    bench.finish_all()
    assert guide.accepted == []
