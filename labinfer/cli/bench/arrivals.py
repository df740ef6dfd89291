"""Arrivals: arrival times of requests in an open-loop benchmark, where no client waits for an answer before it sends the next request."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from labinfer.cli.bench.model import BenchModel
from labinfer.engine.driver import IDLE_SECONDS
from labinfer.engine.request import Request


def arrival_times(count: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Draw random arrival times of ``count`` requests at ``rate`` per second, in seconds from the first arrival.

    With an infinite rate, all times are 0.

    Args:
        burstiness: shape parameter of the gamma distribution of times between arrivals; with 1 the arrivals are a Poisson process.
    """
    draw = random.Random(seed)

    def gap() -> float:
        return draw.expovariate(1.0) if burstiness == 1 else draw.gammavariate(burstiness, 1 / burstiness)

    gaps = [0.0, *(gap() / rate for _ in range(count - 1))]
    return list(itertools.accumulate(gaps))


def stretch_times(times: list[float], rate: float) -> list[float]:
    """Scale arrival times so that ``rate`` requests arrive per second on average. Returns ``times`` if ``rate`` is infinite or all
    times are 0."""
    if math.isinf(rate) or not times[-1]:
        return times
    return [when * (len(times) - 1) / (times[-1] * rate) for when in times]


class Arrivals:
    """Iterable of the requests of a benchmark, for ``LLM.run``. It yields a request when the request is due, and None until then.
    Times are in seconds.

    Args:
        due: arrival time of each request, counted from the start of the iteration.
        max_concurrency: maximum open requests; further requests wait until one finishes; 0 for no limit.
    """

    def __init__(self, llm: BenchModel, requests: list[Request], due: list[float], max_concurrency: int = 0):
        self._llm, self._clock, self._requests, self._due = llm, llm.clock, requests, due
        self._max_concurrency = max_concurrency
        self.begin = 0.0
        """Time at which the iteration started, on the clock of ``llm``."""
        self.late: list[float] = []
        """For each request, seconds from the time when it was due until the engine took it. The engine takes requests only between
        steps."""
        self.empty_time = 0.0
        """Seconds in which the engine had no work."""

    def __iter__(self) -> Iterator[Request | None]:
        self.begin = had_room = self._clock()
        finished_before = self._llm.report.num_finished
        for number, (request, due) in enumerate(zip(self._requests, self._due, strict=True)):
            yield from self._wait_until(self.begin + due)
            while 0 < self._max_concurrency <= number - (self._llm.report.num_finished - finished_before):
                yield None
                had_room = self._clock()
            self.late.append(self._clock() - max(self.begin + due, had_room))
            yield request

    def _wait_until(self, due: float) -> Iterator[None]:
        while (early := due - self._clock()) > 0:
            if self._llm.engine.has_work:
                yield None
                continue
            slept = self._clock()
            if early > 2 * IDLE_SECONDS:
                yield None  # at None, the engine sleeps and checks for signals
            else:
                self._clock.sleep(early)
            self.empty_time += self._clock() - slept
