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
    """Figures for the JSON file, with the names of vLLM's benchmarks where these have them."""
    steps: range
    """Ids of the measured steps, from whose middle the Gantt chart is drawn."""


class Benchmark(Protocol):
    """A benchmark of an engine. Its methods run on rank 0, first ``prepare``, then ``run``."""

    def prepare(self, llm: BenchModel) -> None:
        """Make the benchmark's requests.

        Raises:
            UserError: the requests cannot run on this model.
        """

    def run(self, llm: BenchModel, check: Callable[[], None]) -> BenchResult:
        """Run the benchmark with a single call of ``LLM.run``, as the other ranks take part in only one. ``check`` may
        raise ``Interrupted``."""
