"""Waits for a condition that can only be polled: the rank yields its core at first, and sleeps later.

A rank that yields notices the end of its wait within microseconds and lets other ranks of the machine run; a rank that
sleeps costs next to nothing while the engine is idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from labinfer.comm.progress import Progress

YIELD_SECONDS = 0.02
"""Seconds that a wait yields before it begins to sleep; a step of a small model takes less."""
YIELD_SECONDS_OVERSUBSCRIBED = 0.0002
"""The same where a node has more ranks than cores."""
SHORTEST_SLEEP, LONGEST_SLEEP = 50e-6, 2e-3
"""Seconds. Sleeps grow from the shortest to the longest, which bounds the delay of the first token after an idle time."""


def wait_until(done: Callable[[], bool], what: str, progress: Progress, timeout: float | None = None) -> None:
    """Poll ``done`` until it returns True.

    Args:
        what: what is awaited and from whom, for the error and the watchdog.
        timeout: seconds; None takes the group's limit.

    Raises:
        WaitTimeout: the limit passed.
    """
    limit = progress.timeout if timeout is None else timeout
    yield_seconds = YIELD_SECONDS_OVERSUBSCRIBED if progress.oversubscribed else YIELD_SECONDS
    sleep, begin = SHORTEST_SLEEP, time.monotonic()
    with progress.waiting(what):
        while not done():
            waited = time.monotonic() - begin
            if waited > limit:
                raise progress.timed_out(what, limit)
            if waited < yield_seconds:
                os.sched_yield()
            else:
                time.sleep(sleep)
                sleep = min(sleep * 1.1, LONGEST_SLEEP)
