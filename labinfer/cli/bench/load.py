"""Load: runs requests that arrive at given times, for the throughput and serving benchmarks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from labinfer.cli.bench.arrivals import Arrivals
from labinfer.cli.bench.model import BenchModel
from labinfer.cli.bench.options import BenchOptions, LoadOptions
from labinfer.cli.bench.requests import WARM_UP, RequestMaker, until_idle
from labinfer.engine.request import Request
from labinfer.requests.outputs import Delta, RequestOutput


@dataclass(frozen=True)
class RequestTimes:
    """Times of one request, in seconds after it was sent."""

    first_token: float
    per_output_token: float
    """Time per output token after the first (TPOT); 0 for an answer of one token."""
    end: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LoadTimes:
    """Times of all requests of a measurement, in seconds, and sums over all requests."""

    requests: list[RequestTimes]
    between_tokens: list[float]
    """Seconds between two pieces (of one or more tokens) of an answer, over all answers; empty without streaming."""
    duration: float
    """Seconds from the first arrival to the last token."""
    steps: range
    """Ids of the steps that ran within ``duration``."""

    @property
    def prompt_tokens(self) -> int:
        return sum(times.prompt_tokens for times in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(times.output_tokens for times in self.requests)


class Load:
    """Makes the requests of a measurement, from ``--num-prompts``, ``--dataset`` or ``--workload``, and runs them after
    ``--num-warmups`` warm-up requests."""

    def __init__(self, llm: BenchModel, options: BenchOptions, load: LoadOptions):
        maker = RequestMaker(llm, options)
        self._llm = llm
        self._first_step = 0
        self._warm_ups = [maker.random(WARM_UP) for _ in range(load.num_warmups)]
        self.arrivals: list[float] | None = None
        """Arrival times in seconds from the first request; None if the workload has none."""
        if load.workload:
            self.requests, self.arrivals = maker.workload(load.workload, load.num_prompts)
        elif load.dataset:
            self.requests = maker.dataset(load.dataset, load.num_prompts)
        else:
            self.requests = [maker.random(key) for key in range(load.num_prompts)]

    def run(
        self, due: list[float], check: Callable[[], None], max_concurrency: int = 0, streams: bool = False
    ) -> LoadTimes:
        """Run all requests and measure their times.

        Args:
            due: arrival time of each request, in seconds from the start of the run.
            streams: whether answers are delivered token by token, as to a streaming client.
        """
        arrivals = Arrivals(self._llm, self.requests, due, max_concurrency)
        token_times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

        def note(delta: Delta) -> None:
            if delta.key != WARM_UP:
                token_times[delta.key, delta.index].append(self._llm.clock())

        times, end = [], 0.0
        source = self._source(arrivals)
        with contextlib.closing(self._llm.run(source, check, note if streams else None)) as running:
            for output in running:
                end = self._llm.clock()
                if output.key != WARM_UP:
                    times.append(_request_times(output, arrivals.late[output.key]))
        duration = end - arrivals.begin
        between = [after - before for of_one in token_times.values() for before, after in pairwise(of_one)]
        steps = range(self._first_step, self._llm.engine.scheduler.next_step_id)
        return LoadTimes(times, between, duration, steps)

    def _source(self, arrivals: Arrivals) -> Iterator[Request | None]:
        yield from self._warm_ups
        yield from until_idle(self._llm)
        self._first_step = self._llm.engine.scheduler.next_step_id
        yield from arrivals


def _request_times(output: RequestOutput, late: float) -> RequestTimes:
    return RequestTimes(
        first_token=late + output.time_to_first_token,
        per_output_token=output.time_per_output_token,
        end=late + output.total_time,
        prompt_tokens=len(output.prompt_token_ids),
        output_tokens=output.num_output_tokens,
    )
