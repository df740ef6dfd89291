"""Benchmark and BenchResult: the common interface of the engine benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from labinfer.cli.bench.model import BenchModel


@dataclass(frozen=True)
class BenchResult:
    """The result of a benchmark, as text and as numbers."""

    text: str
    """Tables to print."""
    values: dict[str, Any]
    """Figures for the JSON file. A figure that vLLM's benchmarks also have has vLLM's name."""
    steps: range
    """Ids of the measured steps. The Gantt chart shows steps from the middle of this range."""


class Benchmark(Protocol):
    """A benchmark of an engine. Rank 0 calls ``prepare``, then ``run``."""

    def prepare(self, llm: BenchModel) -> None:
        """Make the benchmark's requests.

        Raises:
            UserError: the requests cannot run on this model.
        """

    def run(self, llm: BenchModel, check: Callable[[], None]) -> BenchResult:
        """Run the benchmark with a single call of ``LLM.run``, as the other ranks take part in only one run. ``LLM.run``
        calls ``check`` in every step; it raises ``Interrupted`` when a signal has requested the end."""
