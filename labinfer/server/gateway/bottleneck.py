"""diagnose: finds what limits a model's throughput, from the stats of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from labinfer.server.gateway.cluster_answers import BottleneckReport, StageLoad
from labinfer.server.link.frames import ModelInfo
from labinfer.server.link.stats import EngineStats, RankStats

MIN_SECONDS, MIN_STEPS = 2.0, 5
"""Minimum seconds with work, and minimum number of steps, that every rank must have for a bottleneck report."""
MIN_BUSY = 0.8
"""Minimum busy fraction with which a stage is the bottleneck, whatever the other stages do."""
MIN_IMBALANCE = 1.1
"""Minimum ratio of the busiest stage's busy fraction to the mean of the other stages at which a layout counts as unbalanced."""
MIN_SHORTAGE = 0.5
"""Minimum shortage of running sequences, on average, at which too few requests are the bottleneck. The shortage is the number of
stages minus the number of running sequences: one sequence per stage keeps all stages busy."""
MIN_QUEUE = 0.5
"""Minimum mean number of waiting sequences that counts as a queue; fewer sequences are only about to start."""
FULL_CACHE, FULL_BATCH = 0.9, 0.95
"""Thresholds at which a resource counts as full: mean fraction of KV blocks in use, and mean number of running
sequences as a fraction of ``--max-num-seqs``."""


def diagnose(window: Sequence[EngineStats], info: ModelInfo, time_us: int, others_ran: bool) -> BottleneckReport | None:
    """Find the bottleneck in the time between the first and the last stats of ``window``. Returns None if a rank has worked too
    little in this time.

    The busiest stage is the bottleneck if it computes nearly all the time, or if its idle fraction is at most the
    excess of its busy fraction over the mean of all stages. Otherwise the idle time of the busiest stage has another
    cause.

    Args:
        window: stats of one model since its engine started, oldest first.
        time_us: time of the last stats of ``window``, in microseconds since 1970.
        others_ran: whether the ranks ran steps of other models, too.
    """
    window = [stats for stats in window if len(stats.ranks) == len(info.ranks)]  # at first, not every rank has reported
    works = _works(window[0], window[-1]) if window else []
    if not works or any(work.seconds < MIN_SECONDS or work.steps < MIN_STEPS for work in works):
        return None
    stages = [_load(stage, works) for stage in sorted({work.stage for work in works})]
    busiest = max(stages, key=lambda stage: stage.busy)
    others = [stage for stage in stages if stage is not busiest]
    lead = busiest.busy / max(fmean(stage.busy for stage in others), 1e-3) if others else 1.0
    latency = info.stage_latency_seconds or None
    at_work = [stats for stats in window if stats.has_work]
    running = fmean(stats.running for stats in at_work) if at_work else None
    bound = _bound(stages, busiest, lead=lead, running=running, latency=latency, others_ran=others_ran)
    has_spare = all(rank.num_layers > 1 for rank in info.ranks if rank.stage == busiest.stage)
    return BottleneckReport(
        time_us=time_us,
        seconds=min(work.seconds for work in works),
        bound=bound,
        stages=stages,
        busiest=busiest.stage,
        lead=lead,
        move_to=min(others, key=lambda stage: stage.busy).stage if bound == "stage" and has_spare else None,
        stage_latency_seconds=latency,
        running=running,
        full=_full(at_work, window[-1].num_preemptions > window[0].num_preemptions, info.max_num_seqs),
    )


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The work of a rank in the time between two reports of its stats."""

    rank: int
    stage: int
    busy: float
    """Seconds in which the rank computed."""
    seconds: float
    """Seconds in which the engine had work."""
    steps: int


def _works(first: EngineStats, last: EngineStats) -> list[_Work]:
    return [_work(before, now) for before, now in zip(first.ranks, last.ranks, strict=True)]


def _work(before: RankStats, now: RankStats) -> _Work:
    busy = now.busy_seconds - before.busy_seconds
    return _Work(
        rank=now.rank,
        stage=now.stage,
        busy=busy,
        seconds=busy + now.bubble_seconds - before.bubble_seconds,
        steps=now.num_steps - before.num_steps,
    )


def _load(stage: int, works: list[_Work]) -> StageLoad:
    work = max((work for work in works if work.stage == stage), key=lambda work: work.busy / work.seconds)
    return StageLoad(stage, min(1.0, work.busy / work.seconds), work.busy / work.steps)


def _bound(
    stages: list[StageLoad],
    busiest: StageLoad,
    *,
    lead: float,
    running: float | None,
    latency: float | None,
    others_ran: bool,
) -> Literal["stage", "stages", "requests", "communication", "models", "outside"]:
    mean, waits = fmean(stage.busy for stage in stages), 1.0 - busiest.busy
    if len(stages) > 1 and mean < MIN_BUSY and running is not None and len(stages) - running >= MIN_SHORTAGE:
        return "requests"
    if waits <= max(1.0 - MIN_BUSY, busiest.busy - mean):
        return "stage" if lead >= MIN_IMBALANCE else "stages"
    if others_ran:
        return "models"
    if latency is not None and busiest.busy > 0 and latency >= 0.5 * waits * busiest.step_seconds / busiest.busy:
        return "communication"
    return "outside"


def _full(at_work: list[EngineStats], preempted: bool, max_num_seqs: int) -> Literal["kv_cache", "max_num_seqs"] | None:
    """The full resource for which sequences wait: KV blocks or places in a batch. None if no sequences wait, or if neither resource
    is full."""
    if not at_work or fmean(stats.waiting for stats in at_work) < MIN_QUEUE:
        return None
    if preempted or fmean(stats.kv_usage for stats in at_work) >= FULL_CACHE:
        return "kv_cache"
    return "max_num_seqs" if fmean(stats.running for stats in at_work) >= FULL_BATCH * max_num_seqs else None
