"""SimulatedExecutor: computes when each stage would finish a plan, instead of running it.

Stages run plans one at a time and in order, links carry messages in order, and rank 0 is one thread. The times of a micro-batch are
therefore sums and maxima of the times of the previous micro-batch (max-plus algebra: Baccelli et al. 1992, "Synchronization and
Linearity"), and no event queue is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from labinfer.base.plan import BatchPlan, BatchResult, EntryResult
from labinfer.base.rank_stats import Slices, WorkerStats
from labinfer.comm.spmd.topology import Topology
from labinfer.observe.recorder import Recorder
from labinfer.planner.simulator.clock import VirtualClock
from labinfer.planner.simulator.plan_times import PlanTimes, TimeSource

NANOSECONDS = 1e9
"""Nanoseconds per second."""


@dataclass(slots=True)
class _MicroBatch:
    plan: BatchPlan
    times: PlanTimes
    sent: float
    """Time (s) at which rank 0 began to send the plan."""
    arrival: float = 0.0
    """Time (s) at which the activations reach the next stage, or the tokens reach rank 0."""
    taken: dict[int, float] = field(default_factory=dict)
    """Time (s), by stage, at which the stage took the plan and began to forward it to other ranks."""


class SimulatedExecutor:
    """Executor that computes times instead of tokens, in place of ``worker.spmd.SpmdExecutor``; see ``labinfer.engine.executor.Executor``.

    In place of a sampled token, a sequence gets its own id modulo ``vocab_size``. Rank 0 may be in any stage: a first stage runs at
    the launch of a plan, a later one during the wait for a result.

    Args:
        source: times of micro-batches.
        clock: advances by rank 0's work and waits.
        vocab_size: upper bound of token ids.
        capacity: trace slices kept per rank; see ``Recorder``.
    """

    def __init__(
        self, topology: Topology, source: TimeSource, clock: VirtualClock, *, vocab_size: int, capacity: int = 0
    ):
        self._topology, self._source, self._clock = topology, source, clock
        self._vocab_size = vocab_size
        num_stages = topology.num_stages
        self._rank0_stage = topology.place(0).stage
        self._results_travel = topology.sampling_rank != 0
        self._stage_free, self._link_free = [0.0] * num_stages, [0.0] * num_stages
        self._launched: deque[_MicroBatch] = deque()
        """Micro-batches that were launched but that rank 0's stage has not run yet."""
        self._results: deque[_MicroBatch] = deque()
        self._in_flight: deque[_MicroBatch] = deque()
        self._num_steps = 0
        self._busy = [0.0] * num_stages
        self._rank0 = Recorder(capacity)
        self._followers = [Recorder(capacity) for _ in range(num_stages)]
        """One recorder per stage, for all ranks of the stage but rank 0: these have equal times."""

    def launch(self, plan: BatchPlan) -> None:
        times, clock = self._source.times(plan), self._clock
        self._wait_on_rank0("schedule", times.schedule, plan)
        micro_batch = _MicroBatch(plan, times, clock())
        self._wait_on_rank0("broadcast", times.broadcast, plan)
        for stage in range(self._rank0_stage):
            self._run_follower(micro_batch, stage)
        self._launched.append(micro_batch)
        self._in_flight.append(micro_batch)
        self._num_steps += 1
        if self._rank0_stage == 0:
            self._progress()

    def wait_result(self) -> BatchResult:
        oldest = self._in_flight.popleft()
        self._clock.sleep(oldest.times.collect)
        begin = self._clock()
        while self._launched and (self._results_travel or not self._results):
            self._progress()
        assert self._results.popleft() is oldest, "results come in the order of their plans"
        self._clock.advance_to(oldest.arrival)
        self._record(self._rank0, "wait for tokens", begin, self._clock(), oldest.plan)
        entries = [EntryResult((entry.seq_id % self._vocab_size,) * entry.num_samples) for entry in oldest.plan.entries]
        return BatchResult(oldest.plan.step_id, entries)

    def end_run(self, finished: list[int]) -> list[WorkerStats]:
        rank0, followers = _take(self._rank0), [_take(recorder) for recorder in self._followers]
        workers = [
            WorkerStats(
                rank=place.rank,
                stage=place.stage,
                tp_rank=place.tp_rank,
                num_steps=self._num_steps,
                busy_time=self._busy[place.stage],
                peak_memory=0,
                private_memory=0,
                weight_bytes_read=0,
                num_threads=0,
                cpus="",
                slices=followers[place.stage] if place.rank else rank0,
                when=self._clock(),
            )
            for place in self._topology.places
        ]
        self._num_steps, self._busy = 0, [0.0] * self._topology.num_stages
        return workers

    def record_steps(self, num_slices: int) -> None:
        """Keep up to ``num_slices`` trace slices per rank."""
        for recorder in (self._rank0, *self._followers):
            recorder.capacity = num_slices

    def _progress(self) -> None:
        """Simulate the oldest launched plan: first rank 0's stage, which advances the clock, then all later stages."""
        micro_batch, number = self._launched.popleft(), self._rank0_stage
        self._take_plan(micro_batch, number)
        self._run_stage(micro_batch, number, self._clock())
        self._clock.advance_to(self._stage_free[number])
        for stage in range(number + 1, self._topology.num_stages):
            self._run_follower(micro_batch, stage)
        if not self._results_travel:
            micro_batch.arrival = self._clock()
        self._results.append(micro_batch)

    def _run_follower(self, micro_batch: _MicroBatch, stage: int) -> None:
        free = self._stage_free[stage]
        ready = self._take_plan(micro_batch, stage)
        self._record(self._followers[stage], "wait for a plan", free, ready, None)
        self._run_stage(micro_batch, stage, ready)

    def _take_plan(self, micro_batch: _MicroBatch, stage: int) -> float:
        """Time at which all ranks of ``stage`` but rank 0 have the plan and are idle."""
        times, taken = micro_batch.times, micro_batch.taken
        ready = max(self._stage_free[stage], micro_batch.sent + times.deliveries[stage])
        for forward in times.forwards[stage] if times.forwards else ():
            ready = max(ready, taken.get(forward.stage, ready) + forward.seconds)
        taken[stage] = ready
        return ready

    def _run_stage(self, micro_batch: _MicroBatch, stage: int, ready: float) -> None:
        """Run a micro-batch on a stage.

        Args:
            ready: time at which the stage has the plan and is idle.
        """
        times = micro_batch.times.stages[stage]
        begin = ready + times.lead
        prepared = begin + times.prepare
        started = max(prepared, micro_batch.arrival) if stage else prepared
        ran = started + times.run
        left = ran + times.sample
        end = left + times.send
        self._stage_free[stage] = end
        self._busy[stage] += times.prepare + times.run + times.sample
        hop = micro_batch.times.hops[stage]
        carried = max(self._link_free[stage], left) + hop.transfer
        self._link_free[stage] = carried
        micro_batch.arrival = carried + hop.latency
        if not self._rank0.capacity:
            return
        bounds = [("step", begin, end), ("prepare", begin, prepared)]
        if stage:
            bounds.append(("wait for activations", prepared, started))
        bounds.append(("run", started, ran))
        if stage == self._topology.num_stages - 1:
            bounds.append(("sample", ran, left))
        if self._topology.num_stages > 1 and (self._results_travel or stage < self._topology.num_stages - 1):
            bounds.append(("send", left, end))
        recorders = [self._followers[stage]] + [self._rank0] * (stage == self._rank0_stage)
        for recorder in recorders:
            for name, slice_begin, slice_end in bounds:
                self._record(recorder, name, slice_begin, slice_end, micro_batch.plan)

    def _wait_on_rank0(self, name: str, seconds: float, plan: BatchPlan) -> None:
        begin = self._clock()
        self._clock.sleep(seconds)
        self._record(self._rank0, name, begin, self._clock(), plan)

    @staticmethod
    def _record(recorder: Recorder, name: str, begin: float, end: float, plan: BatchPlan | None) -> None:
        if recorder.capacity:
            recorder.add(name, round(begin * NANOSECONDS), round(end * NANOSECONDS), plan)


def _take(recorder: Recorder) -> Slices | None:
    """Slices of ``recorder`` for a trace whose time 0 is the start of the simulation."""
    slices = recorder.take()
    return slices and msgspec.structs.replace(slices, clock=0)
