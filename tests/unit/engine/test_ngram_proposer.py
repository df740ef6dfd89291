"""NgramProposer: what it finds, against a search through all of the text."""

from __future__ import annotations

import random

import pytest

from labinfer.base.plan import TokenSampling
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.ngram_proposer import IndexedText, NgramProposer
from labinfer.engine.request import FinishReason, Request
from labinfer.engine.sequence import Sequence


def search(tokens: list[int], limit: int, least: int, most: int) -> list[int]:
    """The longest of the ends of the text that is in it before, at the last place, and what follows there."""
    for length in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length <= len(tokens) and tokens[end - length : end] == tokens[len(tokens) - length :]:
                found = tokens[end : end + limit]
                return [found[index % len(found)] for index in range(limit)]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 5), (3, 3)])
def test_continuation_is_that_of_a_whole_search(least, most):
    draw = random.Random(least * 10 + most)
    for _ in range(40):
        text = IndexedText(least, most)
        tokens: list[int] = []
        while len(tokens) < 40:
            tokens += [draw.randrange(6) for _ in range(draw.randint(1, 4))]
            text.extend(tokens, len(tokens))
            limit = draw.randint(1, 9)
            assert text.continuation(limit) == search(tokens, limit, least, most), tokens


def make_sequence(tokens: list[int]) -> Sequence:
    request = Request(key=0, prompt_token_ids=tokens, sampling=SamplingParams())
    sampling = TokenSampling(num_prompt_tokens=len(tokens))
    return Sequence(
        seq_id=0, request=request, token_ids=list(tokens), token_sampling=sampling, max_tokens=99, max_context=99
    )


def test_sequences_do_not_see_each_other_and_are_forgotten():
    proposer = NgramProposer(2, 3)
    first, second = make_sequence([1, 2, 3, 9, 1, 2]), make_sequence([1, 2, 4, 4, 1, 2])
    assert proposer.propose([first, second], [2, 3]) == [[3, 9], [4, 4, 1]]
    first.token_ids += [3, 9, 1]
    assert proposer.propose([first], [1]) == [[2]]
    first.finish_reason = FinishReason.STOP
    proposer.forget([first, make_sequence([5])])
    assert list(proposer._texts) == [second]


def test_tokens_that_are_only_assumed_are_not_remembered():
    proposer, sequence = NgramProposer(2, 3), make_sequence([1, 2, 3, 4, 1])
    sequence.draft = (2, 5, 2)
    with sequence.with_draft_applied():
        assert proposer.propose([sequence], [2]) == [[]]
    sequence.draft = (2,)
    with sequence.with_draft_applied():
        assert proposer.propose([sequence], [2]) == [[3, 4]]
    sequence.draft = ()
    sequence.token_ids += [2, 6, 5, 2]
    assert proposer.propose([sequence], [2]) == [[]]  # the 2 behind the other 5 never was


def test_repeated_token_costs_no_more_than_another():
    """All places are alike; only some of them are compared."""
    text = IndexedText(2, 5)
    tokens = [7] * 20_000
    text.extend(tokens, len(tokens))
    assert text.continuation(4) == [7, 7, 7, 7]
