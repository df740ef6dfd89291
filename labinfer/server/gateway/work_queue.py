"""WorkQueue: costly work beside the event loop, a few pieces at a time; callers take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from labinfer.requests.openai import api_errors
from labinfer.server.gateway.admission_control import RETRY_SECONDS

MAX_CALLERS = 16
"""Callers whose queues may be full at once."""

Result = TypeVar("Result")


class WorkQueue:
    """Runs work in threads of its own. What is cancelled while it waits leaves the queue. For one event loop.

    Args:
        kind: what waits, for errors: "long prompts".
        max_waiting: pieces of one caller that wait; as many times ``MAX_CALLERS`` of all.
        flag: the option that sets it.
        num_threads: pieces that run at once.
    """

    def __init__(self, kind: str, max_waiting: int, flag: str, num_threads: int = 1):
        self._kind, self._max_waiting, self._flag = kind, max_waiting, flag
        self._threads = ThreadPoolExecutor(num_threads, kind)
        self._num_threads = self._num_free = num_threads
        self._waiting: dict[str, deque[asyncio.Future]] = {}  # callers in the order of their turns
        self._num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether nobody's work is taken now."""
        return self._num_waiting >= MAX_CALLERS * self._max_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, and nothing waits."""
        return not self._num_waiting and self._num_free == self._num_threads

    async def run(self, caller: str, work: Callable[[], Result], abort: Callable[[], None] = lambda: None) -> Result:
        """The result of ``work``, which runs in a thread when it is its caller's turn.

        Args:
            abort: called where this is cancelled while the work runs, to make it end early.

        Raises:
            ApiError: 429 if the caller has as much waiting as may be, 503 if all callers together have.
        """
        await self._await_turn(caller)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._finish)  # the place is free when the thread is, whoever still waits for it
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            abort()
            raise

    async def _await_turn(self, caller: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        waiting = self._waiting.get(caller, deque())
        if len(waiting) >= self._max_waiting:
            raise api_errors.rate_limited(
                f"{len(waiting)} {self._kind} of this caller wait already, as many as may ({self._flag}); "
                "send the next when one is done",
                RETRY_SECONDS,
            )
        if self.is_full:
            raise api_errors.overloaded(
                f"{self._num_waiting} {self._kind} wait, as many as may; try again later", RETRY_SECONDS
            )
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._waiting[caller] = waiting
        self._num_waiting += 1
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it had its place already, when it was cancelled
                self._hand_on()
            else:
                self._leave(caller, turn)
            raise

    def _finish(self, running: asyncio.Future) -> None:
        if not running.cancelled():
            running.exception()  # nobody may be there any more to be told of it
        self._hand_on()

    def _hand_on(self) -> None:
        """Give a place to the next caller's first; its others wait until all have had their turns."""
        if not self._waiting:
            self._num_free += 1
            return
        caller, waiting = next(iter(self._waiting.items()))
        turn = waiting[0]
        self._leave(caller, turn)
        if waiting:
            self._waiting[caller] = self._waiting.pop(caller)
        if turn.done():  # cancelled, and will find that it has left
            self._hand_on()
        else:
            turn.set_result(None)

    def _leave(self, caller: str, turn: asyncio.Future) -> None:
        waiting = self._waiting.get(caller, deque())
        if turn in waiting:
            waiting.remove(turn)
            self._num_waiting -= 1
            if not waiting:
                del self._waiting[caller]
