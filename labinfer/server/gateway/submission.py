"""Submission: the requests of one call, with the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from labinfer.base.errors import UserError
from labinfer.base.pooling import EmbeddingOutput
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.outputs import Delta, RequestOutput, RequestState
from labinfer.server.gateway.refusals import refused_field
from labinfer.text.tokenizer import Tokenizer

Result = TypeVar("Result")


class Submission:
    """The requests of one call on their way: ``open`` and ``start`` them, take their deltas or outputs, ``close`` whatever
    happens.

    All waiting for it ends, and what it holds is freed, when it fails: by its time limit, by the engine's end, and by
    whoever may cancel it. What then raises says ``Raises: ApiError``.

    Args:
        id: name by which it may be cancelled.
        owner: name of the caller who may cancel it.
        seconds: limit of its time; 0 for none.
        make_state: makes the state of a request, with a key that no other has.
        start: hands a submission to the engine.
        end: has the engine forget a submission.
    """

    def __init__(
        self,
        *,
        id: str,
        model: str,
        owner: str,
        seconds: float,
        make_state: Callable[[Request, Tokenizer | None, bool, str], RequestState],
        start: Callable[[Submission], None],
        end: Callable[[Submission], None],
    ):
        self.id, self.model, self.owner = id, model, owner
        self._make_state, self._start, self._end = make_state, start, end
        self.names = {id}
        """Names by which it may be cancelled: its id, and that of the answer where callers see another."""
        self.begin = asyncio.get_running_loop().time()
        """By the clock of its event loop."""
        self.opened: list[RequestState] = []
        """State of each request, when they are known."""
        self._timer: asyncio.TimerHandle | None = None
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, api_errors.timed_out(seconds))
        self._news = asyncio.Event()
        self._changed: dict[tuple[int, int], None] = {}  # (request, answer) with news, in their order
        self._num_accepted = 0
        self._error: ApiError | None = None

    async def after(self, work: Awaitable[Result]) -> Result:
        """Await work that has to be done before; it is cancelled where this fails meanwhile.

        Raises:
            ApiError: it failed; or what ``work`` raises.
        """
        task, failing = asyncio.ensure_future(work), asyncio.ensure_future(self._wait())
        try:
            await asyncio.wait((task, failing), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await failing
            return await task  # also where both are done: ``start`` will raise then
        finally:
            task.cancel()
            failing.cancel()
            await asyncio.gather(failing, return_exceptions=True)

    def open(self, requests: list[Request], tokenizer: Tokenizer | None, streams: bool) -> None:
        """Take in the requests.

        Args:
            streams: whether deltas are asked for.
        """
        self.opened = [self._make_state(request, tokenizer, streams, self.id) for request in requests]

    async def start(self) -> None:
        """Hand them to the engine, and wait until that has taken them.

        Raises:
            ApiError: one of them can never run, too many wait, or they will not be taken.
        """
        if self._error is None:
            self._start(self)
        while self._num_accepted < len(self.opened):
            await self._wait()

    def close(self) -> None:
        """Free what they hold, at once where they are not complete."""
        if self._timer is not None:
            self._timer.cancel()
        self._end(self)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas of the answers as they come, with the number of the request; needs ``RequestState``s that stream.

        Raises:
            ApiError: the rest will not come.
        """
        while not self.is_done or self._changed:
            if not self._changed:
                await self._wait()
            if self._changed:  # one at a time: more may come while this one is sent
                number, index = next(iter(self._changed))
                del self._changed[number, index]
                yield number, self.opened[number].take_delta(index, drops_logprobs=True)

    async def outputs(self) -> list[RequestOutput] | list[EmbeddingOutput]:
        """All answers, or vectors, when they are complete.

        Raises:
            ApiError: they will not come.
        """
        await self.finish()
        return [opened.output() for opened in self.opened]

    async def finish(self) -> None:
        """Wait until all is complete; see ``outputs``."""
        while not self.is_done:
            await self._wait()

    @property
    def is_done(self) -> bool:
        """Whether all requests are complete."""
        return bool(self.opened) and all(opened.is_done for opened in self.opened)

    def fail(self, error: ApiError) -> None:
        """Free what they hold, and end the wait of whoever waits for it, who may be long in coming."""
        if not self.is_done:
            self._error = self._error or error
            self._news.set()
        self._end(self)

    # For the engine.

    def accept(self) -> None:
        """Count a request that the engine has taken."""
        self._num_accepted += 1
        self._news.set()

    def update(self, number: int, update: AnswerUpdate) -> bool:
        """Take in news of an answer. Returns whether the engine must be told that the answer has ended."""
        opened = self.opened[number]
        if opened.answers[update.index].finish_reason is not None:  # a stop string ended it meanwhile
            return False
        if update.finish_reason is FinishReason.ABORT:
            self.fail(
                refused_field(UserError(f"{update.error or 'the engine could not go on'}; the answer was broken off"))
            )
            return False
        stopped = opened.add(update)
        self._changed[number, update.index] = None
        self._news.set()
        return stopped and update.finish_reason is None

    async def _wait(self) -> None:
        if self._error is None:
            await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error.with_traceback(None)  # one error may end many submissions
