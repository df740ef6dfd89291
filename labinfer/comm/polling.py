"""wait_until: polls a condition; yields the core at first, and sleeps later.

A yielding rank notices the end of its wait within microseconds and lets other ranks of the machine run. A sleeping rank costs next
to nothing while the engine is idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from labinfer.comm.progress import Progress

YIELD_SECONDS = 0.02
"""Time that a wait yields before it sleeps; longer than a step of a small model."""
YIELD_SECONDS_OVERSUBSCRIBED = 0.0002
"""``YIELD_SECONDS`` of a node with more ranks than cores."""
SHORTEST_SLEEP, LONGEST_SLEEP = 50e-6, 2e-3
"""Sleeps in seconds. A wait's sleeps grow from the shortest to the longest, which bounds the delay of the first token after an idle period."""


def wait_until(done: Callable[[], bool], what: str, progress: Progress, timeout: float | None = None) -> None:
    """Poll ``done`` until it returns True.

    Args:
        what: the awaited transfer and its peer, for errors and the watchdog.
        timeout: seconds; None for the group's timeout.

    Raises:
        WaitTimeout: the timeout passed.
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
