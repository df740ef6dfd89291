"""When requests come to an engine: an open loop, in which nobody waits for an answer before the next is asked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from labinfer.cli.bench.model import BenchModel
from labinfer.engine.driver import IDLE_SECONDS
from labinfer.engine.request import Request


def arrival_times(count: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Seconds from the first arrival on at which ``count`` requests come, ``rate`` a second.

    With an infinite rate all come at 0.

    Args:
        burstiness: shape of the gamma distribution that gaps are drawn from; 1 is an exponential one, a Poisson process.
    """
    draw = random.Random(seed)

    def gap() -> float:
        return draw.expovariate(1.0) if burstiness == 1 else draw.gammavariate(burstiness, 1 / burstiness)

    gaps = [0.0, *(gap() / rate for _ in range(count - 1))]
    return list(itertools.accumulate(gaps))


def stretch_times(times: list[float], rate: float) -> list[float]:
    """The same arrivals at ``rate`` a second on average; as they are where that is infinite, or they all come at once."""
    if math.isinf(rate) or not times[-1]:
        return times
    return [when * (len(times) - 1) / (times[-1] * rate) for when in times]


class Arrivals:
    """Requests for ``LLM.run``, each when it is due, None until then. Times in seconds.

    Args:
        due: of each request, from the start on.
        max_concurrency: a request that finds so many open is sent when one of them is done; 0 for any number.
    """

    def __init__(self, llm: BenchModel, requests: list[Request], due: list[float], max_concurrency: int = 0):
        self._llm, self._clock, self._requests, self._due = llm, llm.clock, requests, due
        self._max_concurrency = max_concurrency
        self.begin = 0.0
        """When the first was looked for, on the clock of the LLM."""
        self.late: list[float] = []
        """Seconds since each request was sent, when the engine took it: the engine looks between two steps."""
        self.empty_time = 0.0
        """In which there was nothing to run."""

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
                yield None  # the engine sleeps, and looks at signals
            else:
                self._clock.sleep(early)
            self.empty_time += self._clock() - slept
