"""When requests come to an engine: an open loop, in which nobody waits for an answer before the next is asked."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

from labinfer.engine.request import Request
from labinfer.llm import IDLE_SECONDS, LLM


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the first arrival on at which ``count`` requests come, with exponential gaps; ``rate`` a second.

    With an infinite rate all come at 0.
    """
    draw = random.Random(seed)
    gaps = [0.0, *(draw.expovariate(1.0) / rate for _ in range(count - 1))]
    return list(itertools.accumulate(gaps))


class Arrivals:
    """Requests for ``LLM.run``, each when it is due, None until then. Times in seconds.

    Args:
        due: of each request, from the start on.
        max_concurrency: a request that finds so many open is sent when one of them is done; 0 for any number.
    """

    def __init__(self, llm: LLM, requests: list[Request], due: list[float], max_concurrency: int = 0):
        self._llm, self._requests, self._due = llm, requests, due
        self._max_concurrency = max_concurrency
        self.begin = 0.0
        """When the first was looked for, on the clock of ``time.monotonic``."""
        self.late: list[float] = []
        """How long ago each request had been sent when the engine took it: the engine looks between two steps."""
        self.empty_time = 0.0
        """In which there was nothing to run."""

    def __iter__(self) -> Iterator[Request | None]:
        self.begin = had_room = time.monotonic()
        finished_before = self._llm.report.num_finished
        for number, (request, due) in enumerate(zip(self._requests, self._due, strict=True)):
            yield from self._wait_until(self.begin + due)
            while 0 < self._max_concurrency <= number - (self._llm.report.num_finished - finished_before):
                yield None
                had_room = time.monotonic()
            self.late.append(time.monotonic() - max(self.begin + due, had_room))
            yield request

    def _wait_until(self, due: float) -> Iterator[None]:
        while (early := due - time.monotonic()) > 0:
            if self._llm.engine.has_work:
                yield None
                continue
            slept = time.monotonic()
            if early > 2 * IDLE_SECONDS:
                yield None  # the engine sleeps, and looks at signals
            else:
                time.sleep(early)
            self.empty_time += time.monotonic() - slept
