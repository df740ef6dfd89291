"""SpmdExecutor: broadcasts plans to all ranks, and runs rank 0's part of each; ``follow`` is the loop of other
ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from labinfer.base.plan import BatchPlan, BatchResult, EndRun
from labinfer.base.rank_stats import WorkerStats
from labinfer.base.tracer import Tracer
from labinfer.comm.control import ControlChannel
from labinfer.comm.pipeline import PipelineCommunicator, ResultArrival
from labinfer.worker.worker import Worker


class TakeStats(Protocol):
    """Hook for the statistics of a rank, such as ``stats_reporter.StatsReporter``."""

    def take(self) -> WorkerStats:
        """Return this rank's statistics of a run, at its end."""


class SpmdExecutor:
    """Executor on rank 0; see ``labinfer.engine.executor.Executor``. The other ranks run ``follow``.

    Args:
        pipeline: links between stages; None if there is one stage, whose results come straight from this rank's worker.
        model: index of the model among all models that the ranks have loaded.
        on_end: called when a run ends, before the other ranks are told.
    """

    def __init__(
        self,
        channel: ControlChannel,
        worker: Worker,
        pipeline: PipelineCommunicator | None,
        stats: TakeStats,
        recorder: Tracer,
        *,
        model: int = 0,
        on_end: Callable[[], None] = lambda: None,
    ):
        self._channel, self._worker, self._pipeline, self._stats = channel, worker, pipeline, stats
        self._recorder, self._model, self._on_end = recorder, model, on_end
        self._results: deque[BatchResult | ResultArrival] = deque()
        self._num_launched = 0
        """Number of launched plans that this rank has not run yet: a rank on a later stage first waits for activations."""

    def launch(self, plan: BatchPlan) -> None:
        with self._recorder.slice("broadcast", plan):
            self._channel.broadcast(msgspec.structs.replace(plan, model=self._model) if self._model else plan)
        if self._pipeline is not None and self._pipeline.results_travel:
            self._results.append(self._pipeline.post_result(plan.step_id, plan.result_bytes))
        self._worker.launch(plan)
        self._num_launched += 1
        if self._worker.is_first:
            self._progress()

    def _progress(self) -> None:
        result = self._worker.progress()
        self._num_launched -= 1
        if result is not None:
            self._results.append(result)

    def wait_result(self) -> BatchResult:
        while self._num_launched and (not self._results or self._pipeline.results_travel):
            self._progress()
        result = self._results.popleft()
        if isinstance(result, BatchResult):
            return result
        begin = time.perf_counter()
        data = result.wait()
        self._worker.waits["tokens"] += time.perf_counter() - begin
        return BatchResult.decode(data)

    def end_run(self, finished: list[int]) -> list[WorkerStats]:
        self._on_end()
        self._channel.broadcast(EndRun(finished, self._model))
        self._worker.runner.forget(finished)
        self._worker.stop()
        return [self._stats.take(), *self._channel.collect()]


def follow(channel: ControlChannel, models: Sequence[tuple[Worker, TakeStats, Tracer]]) -> None:
    """Loop of every rank but 0, until rank 0 has ended the runs of all ``models``."""
    num_running = len(models)
    while num_running:
        was_on, begin = any(recorder.capacity for _, _, recorder in models), time.perf_counter_ns()
        command = channel.receive()
        worker, stats, recorder = models[command.model]
        if worker.num_steps:  # waits before the first step do not count
            worker.waits["plans"] += (time.perf_counter_ns() - begin) / 1e9
        if was_on and recorder.capacity:  # the wait counts for the model whose plan ended it
            recorder.add("wait for a plan", begin, time.perf_counter_ns(), None)
        if isinstance(command, BatchPlan):
            worker.launch(command)
            worker.progress()
            continue
        assert isinstance(command, EndRun)
        worker.runner.forget(command.finished)
        worker.stop()
        channel.reply(stats.take())
        num_running -= 1
