"""LatencyBenchmark (``launch.py bench latency``): runs a batch of a fixed number of requests again and again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from labinfer.cli.bench.benchmark import BenchResult
from labinfer.cli.bench.model import BenchModel
from labinfer.cli.bench.options import BenchOptions, LatencyOptions
from labinfer.cli.bench.requests import WARM_UP, RequestMaker, until_idle
from labinfer.cli.bench.spread import spread, spread_keys, spread_table
from labinfer.engine.request import Request
from labinfer.observe.gantt import NUM_STEPS


class LatencyBenchmark:
    """Latency of a batch, from the arrival of the first request to the last token of the batch, and TTFT and TPOT of the requests.

    Every repetition has other prompts, so that the prefix cache has no hits.
    """

    def __init__(self, options: BenchOptions, latency: LatencyOptions):
        self._options, self._latency = options, latency
        self._batches: list[list[Request]] = []
        self._seconds: list[float] = []
        self._steps = range(0)

    def prepare(self, llm: BenchModel) -> None:
        maker, latency = RequestMaker(llm, self._options), self._latency
        keys = [WARM_UP] * latency.num_iters_warmup + list(range(latency.num_iters))
        self._batches = [[maker.random(key) for _ in range(latency.batch_size)] for key in keys]

    def run(self, llm: BenchModel, check: Callable[[], None]) -> BenchResult:
        with contextlib.closing(llm.run(self._requests(llm), check)) as running:
            outputs = [output for output in running if output.key != WARM_UP]
        first = [output.time_to_first_token for output in outputs]
        between = [output.time_per_output_token for output in outputs if output.num_output_tokens > 1]
        whole = spread(self._seconds)
        options = self._options
        text = (
            f"{len(self._seconds)} batches of {self._latency.batch_size} requests, {options.input_len} prompt and "
            f"{options.output_len} output tokens each\n\n"
            + spread_table({"whole batch": self._seconds, "TTFT": first, "TPOT": between})
        )
        values = {
            "avg_latency": whole["mean"],
            "latencies": self._seconds,
            "percentiles": {"50": whole["median"], "90": whole["p90"], "99": whole["p99"]},
            **spread_keys("ttft", first),
            **spread_keys("tpot", between),
        }
        return BenchResult(text, values, self._steps[:NUM_STEPS])

    def _requests(self, llm: BenchModel) -> Iterator[Request | None]:
        for batch in self._batches:
            begin, first = llm.clock(), llm.engine.scheduler.next_step_id
            yield from batch
            yield from until_idle(llm)
            if batch[0].key != WARM_UP:
                self._seconds.append(llm.clock() - begin)
                self._steps = self._steps or range(
                    first, llm.engine.scheduler.next_step_id
                )  # steps of the first measured batch
