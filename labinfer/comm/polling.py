"""Waiting for what can only be asked about: at first the core is given away, later the rank sleeps.

Yielding lets another rank of this machine run, and notices within microseconds; an idle rank that sleeps costs next to
nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from labinfer.comm.progress import Progress

YIELD_SECONDS = 0.02
"""How long a wait only yields before it begins to sleep; a step of a small model takes less."""
YIELD_SECONDS_OVERSUBSCRIBED = 0.0002
SHORTEST_SLEEP, LONGEST_SLEEP = 50e-6, 2e-3
"""Sleeps grow from one to the other; the longest bounds what waking up adds to the first token after a pause."""


def wait_until(done: Callable[[], bool], what: str, progress: Progress, timeout: float | None = None) -> None:
    """Ask ``done`` until it says yes.

    Args:
        what: what is awaited and from whom, for the error and the watchdog.
        timeout: seconds; None takes the group's limit.

    Raises:
        WaitTimeout: the limit passed.
    """
    limit = progress.timeout if timeout is None else timeout
    yield_seconds = YIELD_SECONDS_OVERSUBSCRIBED if progress.oversubscribed else YIELD_SECONDS
    pause = SHORTEST_SLEEP
    begin = time.monotonic()
    with progress.waiting(what):
        while not done():
            waited = time.monotonic() - begin
            if waited > limit:
                raise progress.timed_out(what, limit)
            if waited < yield_seconds:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(pause * 1.1, LONGEST_SLEEP)
