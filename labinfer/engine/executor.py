"""Executor: runs the engine's plans."""

from __future__ import annotations

from typing import Protocol

from labinfer.base.plan import BatchPlan, BatchResult
from labinfer.base.rank_stats import WorkerStats


class Executor(Protocol):
    """Runs plans in the order they are launched and gives their results back in the same order."""

    def launch(self, plan: BatchPlan) -> None:
        """Begin a micro-batch. May compute this rank's part of it, but does not wait for other stages."""

    def wait_result(self) -> BatchResult:
        """The result of the oldest micro-batch that was launched and not yet returned."""

    def end_run(self, finished: list[int]) -> list[WorkerStats]:
        """End a run: the workers forget ``finished`` and report, in rank order."""
