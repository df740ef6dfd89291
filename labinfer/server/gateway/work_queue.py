"""WorkQueue: runs costly work in threads, for one caller after the other (round-robin), so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from labinfer.requests.openai import api_errors
from labinfer.server.gateway.admission_control import RETRY_SECONDS

MAX_CALLERS = 16
"""Number of callers whose queues may be full at a time, which bounds the length of all queues together."""

Result = TypeVar("Result")


class WorkQueue:
    """Runs functions in a thread pool, with one queue per caller. Used by one event loop. If a waiting ``run`` is cancelled, its
    work leaves the queue.

    Args:
        kind: name of the work for error messages, such as "long prompts".
        max_waiting: maximum queue length of one caller; all queues together have at most ``MAX_CALLERS`` times as many entries.
        flag: the option that sets ``max_waiting``.
        num_threads: size of the thread pool.
    """

    def __init__(self, kind: str, max_waiting: int, flag: str, num_threads: int = 1):
        self._kind, self._max_waiting, self._flag = kind, max_waiting, flag
        self._threads = ThreadPoolExecutor(num_threads, kind)
        self._num_threads = self._num_free = num_threads
        self._waiting: dict[str, deque[asyncio.Future]] = {}  # callers in round-robin order
        self._num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether the limit of all queues together is reached, so that new work of every caller is rejected."""
        return self._num_waiting >= MAX_CALLERS * self._max_waiting

    @property
    def is_idle(self) -> bool:
        """Whether no work is running or waiting."""
        return not self._num_waiting and self._num_free == self._num_threads

    async def run(self, caller: str, work: Callable[[], Result], abort: Callable[[], None] = lambda: None) -> Result:
        """Run ``work`` in a thread when it is the caller's turn, and return its result.

        Args:
            abort: called if ``run`` is cancelled while the work runs; must make the work end early.

        Raises:
            ApiError: 429 if the caller's queue is full, 503 if the total limit is reached.
        """
        await self._await_turn(caller)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(self._finish)  # the slot becomes free when the thread ends, not its waiter
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
                f"{len(waiting)} {self._kind} of this caller are waiting (limit: {self._flag}); send the next when "
                "one is done",
                RETRY_SECONDS,
            )
        if self.is_full:
            raise api_errors.overloaded(
                f"{self._num_waiting} {self._kind} are waiting, the maximum; try again later", RETRY_SECONDS
            )
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._waiting[caller] = waiting
        self._num_waiting += 1
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # cancelled although it had got a slot: pass the slot on
                self._start_next()
            else:
                self._leave(caller, turn)
            raise

    def _finish(self, running: asyncio.Future) -> None:
        if not running.cancelled():
            running.exception()  # marks the exception as retrieved, as nobody may wait for it
        self._start_next()

    def _start_next(self) -> None:
        """Start the oldest work of the caller whose turn it is, and put the caller at the end of the round-robin order."""
        if not self._waiting:
            self._num_free += 1
            return
        caller, waiting = next(iter(self._waiting.items()))
        turn = waiting[0]
        self._leave(caller, turn)
        if waiting:
            self._waiting[caller] = self._waiting.pop(caller)
        if turn.done():  # the waiter was cancelled, but its work is still in the queue
            self._start_next()
        else:
            turn.set_result(None)

    def _leave(self, caller: str, turn: asyncio.Future) -> None:
        waiting = self._waiting.get(caller, deque())
        if turn in waiting:
            waiting.remove(turn)
            self._num_waiting -= 1
            if not waiting:
                del self._waiting[caller]
