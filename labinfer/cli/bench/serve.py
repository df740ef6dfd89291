"""ServeBenchmark (``launch.py bench serve``): requests arrive at a given rate, whether or not the engine keeps up."""

from __future__ import annotations

import math
from collections.abc import Callable

from labinfer.cli.bench.arrivals import arrival_times, stretch_times
from labinfer.cli.bench.benchmark import BenchResult
from labinfer.cli.bench.load import Load, RequestTimes
from labinfer.cli.bench.model import BenchModel
from labinfer.cli.bench.options import BenchOptions, LoadOptions, ServeOptions
from labinfer.cli.bench.spread import spread_keys, spread_table
from labinfer.cli.bench.throughput import rates_table

MEASURES: dict[str, Callable[[RequestTimes], float]] = {
    "ttft": lambda times: times.first_token,
    "tpot": lambda times: times.per_output_token,
    "e2el": lambda times: times.end,
}
"""Name of each latency that ``--goodput`` can limit → function that returns the latency, in seconds, of a request."""


class ServeBenchmark:
    """Latencies under load: time to first token (TTFT), per output token (TPOT), between tokens (ITL), and end to end
    (E2EL).

    Times count from the moment when a request is sent: its arrival time, or a later time if ``--max-concurrency`` delays the
    request. Goodput (Zhong et al. 2024, DistServe) is the rate of requests that meet all latency limits.
    """

    def __init__(self, options: BenchOptions, load: LoadOptions, serve: ServeOptions):
        self._options, self._load_options, self._serve = options, load, serve
        self._load: Load | None = None

    def prepare(self, llm: BenchModel) -> None:
        self._load = Load(llm, self._options, self._load_options)

    def run(self, llm: BenchModel, check: Callable[[], None]) -> BenchResult:
        serve = self._serve
        due, rate = self._arrivals(), serve.request_rate
        if self._load.arrivals is not None and math.isinf(rate) and due[-1]:
            rate = (len(due) - 1) / due[-1]
        times = self._load.run(due, check, serve.max_concurrency, streams=True)
        seconds = {
            "ttft": [request.first_token for request in times.requests],
            "tpot": [request.per_output_token for request in times.requests if request.output_tokens > 1],
            "itl": times.between_tokens,
            "e2el": [request.end for request in times.requests],
        }
        values = {
            "request_rate": rate if math.isfinite(rate) else "inf",
            "max_concurrency": serve.max_concurrency or None,
            "duration": times.duration,
            "completed": len(times.requests),
            "total_input_tokens": times.prompt_tokens,
            "total_output_tokens": times.output_tokens,
            "request_throughput": len(times.requests) / times.duration,
            "output_throughput": times.output_tokens / times.duration,
            "total_token_throughput": (times.prompt_tokens + times.output_tokens) / times.duration,
        }
        text = rates_table(times) + "\n\n" + spread_table({name.upper(): of_one for name, of_one in seconds.items()})
        if goals := serve.goals:
            num_good = sum(is_good(request, goals) for request in times.requests)
            values["request_goodput"] = num_good / times.duration
            text += (
                f"\n\ngoodput: {num_good} of {len(times.requests)} requests, {num_good / times.duration:.2f} per second"
            )
        for name, of_one in seconds.items():
            values |= spread_keys(name, of_one)
        return BenchResult(text, values, times.steps)

    def _arrivals(self) -> list[float]:
        """Arrival time of each request, in seconds from the first arrival."""
        load, serve = self._load, self._serve
        if load.arrivals is not None:
            return stretch_times(load.arrivals, serve.request_rate)
        return arrival_times(len(load.requests), serve.request_rate, self._options.seed, serve.burstiness)


def is_good(times: RequestTimes, goals: dict[str, float]) -> bool:
    """Whether a request meets all latency limits. ``goals`` are in seconds, by name."""
    return all(MEASURES[name](times) <= goal for name, goal in goals.items())
