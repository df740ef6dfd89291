"""A task whose engine accepts, runs and aborts its request before the task's coroutine continues, as on a busy machine."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import MagicMock

import pytest

from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.outputs import RequestState
from labinfer.server.gateway.generation_task import GenerationTask

SEVENS = AnswerUpdate(index=0, token_ids=[7, 7])
ABORT = AnswerUpdate(index=0, finish_reason=FinishReason.ABORT, error="bad_words allow no token")


class InstantEngine:
    """An engine whose updates arrive together, several in one turn of the event loop.

    Args:
        accepts: whether it accepts the request first.
        turns: the updates of each turn.
    """

    def __init__(self, accepts: bool, *turns: list[AnswerUpdate]):
        self._accepts, self._turns = accepts, turns

    def start(self, task: GenerationTask) -> None:
        for number, updates in enumerate(self._turns):
            accepts = self._accepts and number == 0
            asyncio.get_running_loop().call_later(0.05 * number, self._answer, task, accepts, updates)

    def _answer(self, task: GenerationTask, accepts: bool, updates: list[AnswerUpdate]) -> None:
        if accepts:
            task.accept()
        for update in updates:
            task.update(0, update)

    def forget(self, task: GenerationTask) -> None:
        pass


async def run(engine: InstantEngine) -> tuple[list[int], str]:
    """Return the tokens of all deltas of a streaming task, and the error that ended the stream."""
    context = MagicMock(seconds=0, begin=0.0)
    context.service.engine, context.service.clock = engine, time.monotonic
    task = GenerationTask(context, MagicMock(), MagicMock(user=None))
    task._lease = MagicMock()
    task.opened = [
        RequestState(Request(key="1", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=4)), None, streams=True)
    ]
    await task._hand_over()
    token_ids: list[int] = []
    try:
        async for _, delta in task.deltas():
            token_ids += delta.token_ids
    except ApiError as error:
        return token_ids, str(error)
    return token_ids, ""


@pytest.mark.parametrize("turns", [[[SEVENS, ABORT]], [[SEVENS], [SEVENS, ABORT]]], ids=["at once", "after some"])
def test_output_before_an_abort_is_streamed(turns):
    token_ids, error = asyncio.run(run(InstantEngine(True, *turns)))
    assert token_ids == [7, 7] * len(turns) and "the output was aborted" in error


@pytest.mark.parametrize(("accepts", "updates"), [(True, [ABORT]), (False, [SEVENS, ABORT])])
def test_failure_without_output_or_acceptance_is_a_refusal(accepts, updates):
    with pytest.raises(ApiError, match="the output was aborted"):
        asyncio.run(asyncio.wait_for(run(InstantEngine(accepts, updates)), 10))
