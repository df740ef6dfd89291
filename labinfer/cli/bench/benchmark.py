"""Benchmark and BenchResult: the common interface of the engine benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from labinfer.cli.bench.model import BenchModel


@dataclass(frozen=True)
class BenchResult:
    """The result of a benchmark."""

    text: str
    """Tables to print."""
    values: dict[str, Any]
    """Figures for JSON, with the names of vLLM's benchmarks where they exist."""
    steps: range
    """Ids of measured steps; a Gantt chart shows those in the middle."""


class Benchmark(Protocol):
    """One benchmark; its methods run on rank 0, in the order of definition."""

    def prepare(self, llm: BenchModel) -> None:
        """Make the requests.

        Raises:
            UserError: the requests cannot run on this model.
        """

    def run(self, llm: BenchModel, check: Callable[[], None]) -> BenchResult:
        """Measure in a single ``LLM.run``, as the other ranks follow only one. ``check`` may raise ``Interrupted``."""
