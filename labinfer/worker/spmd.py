"""The executor of a real group: plans go down the control channel to all ranks, this rank's worker takes part too."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

import msgspec
import torch

from labinfer.base.plan import BatchPlan, BatchResult, EndRun
from labinfer.base.rank_stats import ExpertReads, Slices, WorkerStats
from labinfer.base.tracer import Tracer
from labinfer.comm.control import ControlChannel
from labinfer.comm.pipeline import PipelineCommunicator, ResultArrival
from labinfer.comm.spmd.machine import peak_memory, private_memory, total_memory, used_memory
from labinfer.comm.spmd.threads import format_ranges
from labinfer.comm.spmd.topology import Place
from labinfer.functions.expert_offload import ExpertOffload
from labinfer.worker.worker import Worker


class SpmdExecutor:
    """Rank 0's side; see ``labinfer.engine.executor.Executor``. Followers run ``follow``.

    Args:
        pipeline: None when there is one stage; its results then come straight from this rank's worker.
        model: number of the model among those of the group.
        on_end: called when a run ends, before the ranks are told.
    """

    def __init__(
        self,
        channel: ControlChannel,
        worker: Worker,
        pipeline: PipelineCommunicator | None,
        stats: StatsReporter,
        recorder: Tracer,
        *,
        model: int = 0,
        on_end: Callable[[], None] = lambda: None,
    ):
        self._channel, self._worker, self._pipeline, self._stats = channel, worker, pipeline, stats
        self._recorder, self._model, self._on_end = recorder, model, on_end
        self._results: deque[BatchResult | ResultArrival] = deque()
        self._num_launched = 0
        """Plans that this rank has not run yet: on a later stage the one before it has to come first."""

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


class StatsReporter:
    """Statistics of this rank since the last report.

    Args:
        pipeline: None when there is one stage.
        offload: None where all experts are in memory.
    """

    def __init__(
        self,
        place: Place,
        worker: Worker,
        pipeline: PipelineCommunicator | None,
        *,
        device: torch.device,
        weight_bytes_read: int,
        recorder: Tracer,
        offload: ExpertOffload | None = None,
    ):
        self._place, self._worker, self._pipeline, self._device = place, worker, pipeline, device
        self._weight_bytes_read, self._recorder, self._offload = weight_bytes_read, recorder, offload
        self._memory_total = total_memory(device)

    def report(self, num_slices: int) -> WorkerStats:
        """While steps run, with the slices since the last call; another thread may call it.

        Args:
            num_slices: to record until the next call; with 0 none are.
        """
        slices = self._recorder.take()
        self._recorder.capacity = num_slices
        return self._read(slices)

    def take(self) -> WorkerStats:
        """At the end of a run; the next one counts from 0 again."""
        stats = self._read(self._recorder.take())
        self.reset()
        return stats

    def reset(self) -> None:
        """Count from 0 again."""
        self._worker.reset_counters()
        if self._offload is not None:
            self._offload.reset_stats()

    def _read(self, slices: Slices | None) -> WorkerStats:
        return WorkerStats(
            rank=self._place.rank,
            stage=self._place.stage,
            tp_rank=self._place.tp_rank,
            num_steps=self._worker.num_steps,
            busy_time=self._worker.busy_time,
            layer_time=self._worker.layer_time if self._device.type == "cpu" else self._worker.busy_time,
            peak_memory=peak_memory(self._device),
            private_memory=private_memory(),
            weight_bytes_read=self._weight_bytes_read,
            num_threads=torch.get_num_threads(),
            cpus=format_ranges(os.sched_getaffinity(0)),
            slices=slices,
            bytes_sent=dict(self._pipeline.bytes_sent) if self._pipeline else {},
            expert_tokens=self._worker.expert_tokens(),
            expert_reads=ExpertReads(**asdict(self._offload.stats)) if self._offload is not None else None,
            when=time.monotonic(),
            memory_total=self._memory_total,
            memory_used=used_memory(self._device, self._memory_total),
            waits={name: seconds for name, seconds in self._worker.waits.items() if seconds},
        )


def follow(channel: ControlChannel, models: Sequence[tuple[Worker, StatsReporter, Tracer]]) -> None:
    """The loop of every rank but 0, until rank 0's runs of all these models have ended."""
    num_running = len(models)
    while num_running:
        was_on, begin = any(recorder.capacity for _, _, recorder in models), time.perf_counter_ns()
        command = channel.receive()
        worker, stats, recorder = models[command.model]
        if worker.num_steps:  # before the first one there was no run
            worker.waits["plans"] += (time.perf_counter_ns() - begin) / 1e9
        if was_on and recorder.capacity:  # the wait is of the model whose plan has ended it
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
