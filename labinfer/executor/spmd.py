"""The executor of a real group: plans go down the control channel to all ranks, this rank's worker takes part too."""

from __future__ import annotations

import os
from collections import deque

import torch

from labinfer.comm.control import ControlChannel
from labinfer.comm.pipeline import PipelineCommunicator, TokenArrival
from labinfer.observe.recorder import Recorder
from labinfer.plan import BatchPlan, BatchResult, Pause, WorkerStats
from labinfer.spmd.machine import peak_memory, private_memory
from labinfer.spmd.threads import format_ranges
from labinfer.spmd.topology import Place
from labinfer.worker.worker import Worker


class SpmdExecutor:
    """Rank 0's side; see ``labinfer.engine.executor.Executor``. Followers run ``follow``.

    Args:
        pipeline: None when there is one stage; its tokens then come straight from this rank's worker.
    """

    def __init__(
        self,
        channel: ControlChannel,
        worker: Worker,
        pipeline: PipelineCommunicator | None,
        stats: StatsReporter,
        recorder: Recorder,
    ):
        self._channel, self._worker, self._pipeline, self._stats = channel, worker, pipeline, stats
        self._recorder = recorder
        self._results: deque[BatchResult | TokenArrival] = deque()

    def launch(self, plan: BatchPlan) -> None:
        with self._recorder.slice("broadcast", plan):
            self._channel.broadcast(plan)
        if self._pipeline is not None:
            self._results.append(self._pipeline.post_tokens(plan.step_id, plan.num_samples, plan.num_values))
        self._worker.launch(plan)
        result = self._worker.progress()
        if result is not None:
            self._results.append(result)

    def wait_result(self) -> BatchResult:
        result = self._results.popleft()
        return result if isinstance(result, BatchResult) else BatchResult(result.step_id, *result.wait())

    def pause(self, finished: list[int]) -> list[WorkerStats]:
        self._channel.broadcast(Pause(finished))
        self._worker.runner.forget(finished)
        self._worker.stop()
        return [self._stats.take(), *self._channel.collect()]


class StatsReporter:
    """What this rank did since the last report."""

    def __init__(self, place: Place, worker: Worker, device: torch.device, weight_bytes_read: int, recorder: Recorder):
        self._place, self._worker, self._device = place, worker, device
        self._weight_bytes_read, self._recorder = weight_bytes_read, recorder

    def take(self) -> WorkerStats:
        num_steps, busy_time = self._worker.take_times()
        return WorkerStats(
            self._place.rank,
            self._place.stage,
            self._place.tp_rank,
            num_steps,
            busy_time,
            peak_memory(self._device),
            private_memory(),
            self._weight_bytes_read,
            torch.get_num_threads(),
            format_ranges(os.sched_getaffinity(0)),
            self._recorder.take(),
        )


def follow(channel: ControlChannel, worker: Worker, stats: StatsReporter, recorder: Recorder) -> None:
    """The loop of every rank but 0, until rank 0's run ends."""
    while True:
        with recorder.slice("wait for a plan"):
            command = channel.receive()
        if not isinstance(command, BatchPlan):
            break
        worker.launch(command)
        worker.progress()
    assert isinstance(command, Pause)
    worker.runner.forget(command.finished)
    worker.stop()
    channel.report(stats.take())
