"""Executor: interface through which the engine runs plans on workers or in a simulator."""

from __future__ import annotations

from typing import Protocol

from labinfer.base.plan import BatchPlan, BatchResult
from labinfer.base.rank_stats import WorkerStats


class Executor(Protocol):
    """Runs plans in the order in which they are launched, and returns their results in that order."""

    def launch(self, plan: BatchPlan) -> None:
        """Launch a micro-batch. May compute this rank's part of it, but does not wait for other stages."""

    def wait_result(self) -> BatchResult:
        """Wait for the result of the oldest launched micro-batch that has not been returned."""

    def end_run(self, finished: list[int]) -> list[WorkerStats]:
        """End a run: the workers forget the sequences ``finished``. Returns their statistics in rank order."""
