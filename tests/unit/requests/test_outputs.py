"""States of requests as their tokens come."""

from __future__ import annotations

import pytest

from labinfer.base.plan import TokenLogprobs
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.outputs import RequestState


def update(*token_ids: int, finish_reason: FinishReason | None = None) -> AnswerUpdate:
    logprobs = [TokenLogprobs(token, -float(token), {}) for token in token_ids]
    return AnswerUpdate(index=0, token_ids=list(token_ids), logprobs=logprobs, finish_reason=finish_reason)


@pytest.mark.parametrize("drops", [False, True])
def test_deltas_have_all_log_probabilities_also_where_these_are_dropped(drops):
    request = Request(key=0, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=9, logprobs=0))
    state, told = RequestState(request, None, streams=True), []
    for number, step in enumerate(
        [update(1, 2), update(3), update(4, 5), update(6, finish_reason=FinishReason.LENGTH)]
    ):
        state.add(step)
        if number != 1:  # one delta has the tokens of two updates
            told += state.take_delta(0, drops_logprobs=drops).logprobs
    assert [measured.logprob for measured in told] == [-1, -2, -3, -4, -5, -6]
    assert len(state.answers[0].logprobs) == (0 if drops else 6)
