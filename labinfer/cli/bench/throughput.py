"""ThroughputBenchmark (``launch.py bench throughput``): all requests arrive at the start."""

from __future__ import annotations

from collections.abc import Callable

from labinfer.cli.bench.benchmark import BenchResult
from labinfer.cli.bench.load import Load, LoadTimes
from labinfer.cli.bench.model import BenchModel
from labinfer.cli.bench.options import BenchOptions, LoadOptions
from labinfer.observe.table import format_table


class ThroughputBenchmark:
    """Requests, input tokens and output tokens per second, if all requests arrive at the start."""

    def __init__(self, options: BenchOptions, load: LoadOptions):
        self._options, self._load_options = options, load
        self._load: Load | None = None

    def prepare(self, llm: BenchModel) -> None:
        self._load = Load(llm, self._options, self._load_options)

    def run(self, llm: BenchModel, check: Callable[[], None]) -> BenchResult:
        times = self._load.run([0.0] * len(self._load.requests), check)
        values = {
            "elapsed_time": times.duration,
            "num_requests": len(times.requests),
            "total_num_tokens": times.prompt_tokens + times.output_tokens,
            "requests_per_second": len(times.requests) / times.duration,
            "tokens_per_second": (times.prompt_tokens + times.output_tokens) / times.duration,
            "input_tokens_per_second": times.prompt_tokens / times.duration,
            "output_tokens_per_second": times.output_tokens / times.duration,
        }
        return BenchResult(rates_table(times), values, times.steps)


def rates_table(times: LoadTimes) -> str:
    """Table with the numbers of requests and tokens of a run, and their rates per second."""
    seconds = times.duration
    counts = {
        "requests": len(times.requests),
        "input tokens": times.prompt_tokens,
        "output tokens": times.output_tokens,
        "all tokens": times.prompt_tokens + times.output_tokens,
    }
    rows = [(name, count, round(count / seconds, 2)) for name, count in counts.items()]
    return format_table((f"in {seconds:.2f} s", "count", "per second"), rows)
