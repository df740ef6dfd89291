"""Benchmark and BenchResult: the common form of the benchmarks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from labinfer.cli.bench.model import BenchModel


@dataclass(frozen=True)
class BenchResult:
    """The result of a benchmark."""

    text: str
    """For people."""
    values: dict[str, Any]
    """The same for machines, under the names of vLLM's benchmarks where it has them."""
    steps: range
    """Ids of measured steps, of which a chart shows those in the middle."""


class Benchmark(Protocol):
    """One benchmark; its methods run on rank 0, in this order."""

    def prepare(self, llm: BenchModel) -> None:
        """Make the requests.

        Raises:
            UserError: they cannot run on this model.
        """

    def run(self, llm: BenchModel, check: Callable[[], None]) -> BenchResult:
        """Measure, in one ``LLM.run``, as the other ranks follow one. ``check`` may raise ``Interrupted``."""
