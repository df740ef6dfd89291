"""Waiting on a condition that can only be polled: the rank yields its core at first, and sleeps later; one whose cores others
use meanwhile sleeps at once, until its doorbell rings.

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
SHORTEST_SLEEP_WITH_BELL = 500e-6
"""The shortest of a rank whose cores others use meanwhile: each end takes time from whoever computes there."""
YIELD_SECONDS_AFTER_BELL = 0.0002
"""A large message takes several steps, and rings once."""


def wait_until(
    done: Callable[[], bool],
    what: str,
    progress: Progress,
    timeout: float | None = None,
    *,
    rings: bool = False,
    longest_sleep: float = LONGEST_SLEEP,
) -> None:
    """Poll ``done`` until it returns True.

    Args:
        what: what is awaited and from whom, for the error and the watchdog.
        timeout: seconds; None takes the group's limit.
        rings: whether this rank's doorbell, if it has one, rings when it may be done.
        longest_sleep: seconds, where there is a bell that rings.

    Raises:
        WaitTimeout: the limit passed.
    """
    limit = progress.timeout if timeout is None else timeout
    bells = progress.doorbells if rings else None
    heard = 0
    if bells is None:
        longest_sleep = LONGEST_SLEEP
    else:
        heard = bells.rings()
    if bells is not None and progress.on_wait is not None:
        sleep, alert_until = SHORTEST_SLEEP_WITH_BELL, 0.0
    else:
        sleep = SHORTEST_SLEEP
        alert_until = YIELD_SECONDS_OVERSUBSCRIBED if progress.oversubscribed else YIELD_SECONDS
    begin = time.monotonic()
    with progress.waiting(what):
        while True:
            rung = bells.rings() if bells is not None else 0  # before the look, so that a ring after it is noticed
            if done():
                return
            waited = time.monotonic() - begin
            if waited > limit:
                raise progress.timed_out(what, limit)
            if rung != heard:
                heard, alert_until = rung, max(alert_until, waited + YIELD_SECONDS_AFTER_BELL)
            if waited < alert_until:
                os.sched_yield()
                continue
            if bells is not None:
                bells.sleep(rung, sleep)
            else:
                time.sleep(sleep)
            sleep = min(sleep * 1.1, longest_sleep)
