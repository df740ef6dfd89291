"""ClusterHistory: statistics of the last hour of each model, and traces of steps while a client watches."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from labinfer.base.rank_stats import Slices
from labinfer.observe.trace import WAIT_PREFIX, Slice, Track, read_slices
from labinfer.server.gateway.bottleneck import diagnose
from labinfer.server.gateway.cluster_answers import (
    BottleneckReport,
    LayoutDrift,
    RankPoint,
    RankTrace,
    RankTraffic,
    StatsEvent,
    StatsPoint,
    Step,
    StepSequence,
    TraceEvent,
)
from labinfer.server.gateway.event_stream import event
from labinfer.server.gateway.point_history import FINE_SECONDS, POINT_SECONDS, PointHistory
from labinfer.server.gateway.recent_latencies import RecentLatencies
from labinfer.server.gateway.stage_speeds import find_stage_speeds
from labinfer.server.link.frames import ModelInfo, RankShardInfo, Trace
from labinfer.server.link.stats import Drift, EngineStats, RankStats, TracedStep

PAUSE_SECONDS = 4.0
"""An idle engine sends no stats. If stats arrive after a gap of more than ``PAUSE_SECONDS``, the point of the history covers only
``POINT_SECONDS``, not the idle time."""
REPORT_SECONDS = 10.0
"""Seconds of statistics from which bottleneck reports and rates of traffic between ranks are computed."""
SPEED_SECONDS, MARK_SECONDS = 60.0, 5.0
"""Seconds of statistics from which stage speeds and cache hit rates are computed, and seconds between two of the stats that are
kept for these values."""
KEPT_BYTES = 4 << 20
"""Maximum bytes of trace slices that are kept per model: about half a minute of short steps on two ranks."""
IDLE_SECONDS = 10.0
"""Maximum seconds of a wait that a trace shows. Longer waits are left out: a trace could otherwise begin an hour before its first
step."""
MAX_BEHIND = 8
"""Maximum number of queued events per watching client; a slower client loses the oldest events."""


class Watcher:
    """Event queue of a client that watches one model. The events are the model's stats and traces."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()

    def add(self, data: bytes) -> None:
        """Enqueue an event for ``next``; if too many are queued, the oldest is dropped."""
        if self._events.qsize() >= MAX_BEHIND:
            self._events.get_nowait()
        self._events.put_nowait(data)

    def end(self) -> None:
        """Make ``next`` return None once all queued events are taken."""
        self._events.put_nowait(None)

    async def next(self, seconds: float | None = None) -> bytes | None:
        """Return the next event, encoded. None after the last event, or after a timeout of ``seconds``."""
        try:
            return await asyncio.wait_for(self._events.get(), seconds)
        except asyncio.TimeoutError:  # the name of TimeoutError before Python 3.11
            return None


@dataclass(kw_only=True)
class ModelHistory:
    """Statistics, trace slices and watching clients of one model."""

    last: EngineStats
    last_time: float
    """Time of the latest point in ``points``, in seconds since 1970."""
    info: ModelInfo | None = None
    """Description of the model; None until an engine host has loaded the model."""
    points: PointHistory
    """Points of the last hour."""
    recent: deque[tuple[float, EngineStats]] = field(default_factory=deque)
    """Stats of the last ``REPORT_SECONDS``, as (arrival time, stats)."""
    minute: deque[tuple[float, EngineStats]] = field(default_factory=deque)
    """Stats of the last ``SPEED_SECONDS``, one every ``MARK_SECONDS``, as (arrival time, stats). The first entry is from before
    that time."""
    bottleneck: BottleneckReport | None = None
    slices: deque[tuple[float, int, Slices]] = field(default_factory=deque)
    """Trace slices, as (arrival time, rank, slices)."""
    slice_bytes: int = 0
    watchers: set[Watcher] = field(default_factory=set)


class ClusterHistory:
    """History of all models of a gateway.

    Args:
        watch: called with True when the first client starts to watch, and with False when the last one stops.
        count_open: returns the numbers of running and of waiting requests of a model.
        latencies: latencies of each model in the last minute.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        model_names: Iterable[str],
        watch: Callable[[bool], None],
        count_open: Callable[[str], tuple[int, int]],
        latencies: RecentLatencies,
        clock: Callable[[], float] = time.time,
    ):
        self._count_open, self._latencies = count_open, latencies
        self._models = {
            name: ModelHistory(last=EngineStats(model=name), last_time=clock(), points=PointHistory(clock))
            for name in model_names
        }
        self._watch, self._clock = watch, clock
        self._ended = False
        self.tracing = asyncio.Lock()
        """Lock held while a trace file is built, so that only one is built at a time: builds take memory and CPU from requests."""

    # Called by the gateway with data of the engine.

    def begin(self) -> None:
        """Prepare for the stats of a new engine host, whose counters begin at 0."""
        self._ended = False
        for name, model in self._models.items():
            model.last, model.last_time = EngineStats(model=name), self._clock()
            model.recent.clear()
            model.minute.clear()
            model.bottleneck = None
        if self._is_watched:
            self._watch(True)

    def attach(self, models: Iterable[ModelInfo]) -> None:
        """Store the descriptions of the models that an engine host has loaded."""
        for info in models:
            self._models[info.name].info = info

    def add_stats(self, stats: EngineStats) -> None:
        """Add the latest stats of a model."""
        model, now = self._models[stats.model], self._clock()
        model.last_time = min(model.last_time, now)  # the clock may have been set back
        if now - model.last_time < POINT_SECONDS and not model.points.is_empty:
            return  # too early for a point; more stats come before work ends
        minute = model.minute
        if minute and minute[-1][0] > now:
            minute.clear()
        if not minute or minute[-1][0] <= now - MARK_SECONDS:
            minute.append((now, stats))
        while len(minute) > 1 and minute[1][0] <= now - SPEED_SECONDS:
            minute.popleft()
        seconds = max(now - model.last_time, 1e-3)
        if seconds > PAUSE_SECONDS and not model.last.has_work:
            seconds = POINT_SECONDS  # the engine was idle before
        point = self._point(model, stats, seconds, now)
        model.last, model.last_time = stats, now
        model.points.add(point)
        if model.recent and model.recent[-1][0] > now:
            model.recent.clear()
        model.recent.append((now, stats))
        while model.recent[0][0] < now - REPORT_SECONDS:
            model.recent.popleft()
        model.bottleneck = self._diagnose(model, point.time_us) or model.bottleneck
        if model.watchers:
            _hand_out(model, StatsEvent(**msgspec.structs.asdict(point), **self.present(stats.model)))

    def add_trace(self, trace: Trace) -> None:
        """Add the latest steps and trace slices of a model."""
        model, now = self._models[trace.model], self._clock()
        for rank, slices in trace.slices:
            model.slices.append((now, rank, slices))
            model.slice_bytes += len(slices.numbers)
        while model.slices and (model.slice_bytes > KEPT_BYTES or model.slices[0][0] < now - FINE_SECONDS):
            model.slice_bytes -= len(model.slices.popleft()[2].numbers)
        if model.watchers:
            _hand_out(model, _trace_event(trace))

    def end(self) -> None:
        """End the event streams of all watching clients, as the engine host sends no more data."""
        self._ended = True
        for model in self._models.values():
            for watcher in model.watchers:
                watcher.end()

    # Called by route handlers.

    def points(self, name: str) -> list[StatsPoint]:
        """Points of the last hour of a model, oldest first."""
        return self._models[name].points.read()

    def rank_stats(self, name: str) -> dict[int, RankStats]:
        """Map each rank of a model to its last stats."""
        return {stats.rank: stats for stats in self._models[name].last.ranks}

    def present(self, name: str) -> dict[str, Any]:
        """Current values for the fields of a ``StatsEvent`` that a ``StatsPoint`` lacks: traffic, stage speeds, bottleneck and
        drift."""
        model = self._models[name]
        before = {rank.rank: rank for rank in model.recent[0][1].ranks} if model.recent else {}
        ranks = model.last.ranks
        return {
            "links": [
                _rank_traffic(before.get(rank.rank), rank, to) for rank in ranks for to in sorted(rank.bytes_sent)
            ],
            "stages": find_stage_speeds(model.minute[0][1], model.last) if model.minute else [],
            "bottleneck": model.bottleneck,
            "drift": _layout_drift(model.last.drift),
        }

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[Watcher]:
        """Context in which a new ``Watcher`` receives the model's events; inside the context, all ranks trace their steps."""
        model, watcher = self._models[name], Watcher()
        if not self._is_watched:
            self._watch(True)
        model.watchers.add(watcher)
        if self._ended:
            watcher.end()
        try:
            yield watcher
        finally:
            model.watchers.discard(watcher)
            if not self._is_watched:
                self._watch(False)

    def tracks(
        self, name: str, ranks: Iterable[RankShardInfo], since: float = 0.0, seconds: float = math.inf
    ) -> list[Track]:
        """The trace slices of each rank, as tracks. Slow if there are many slices: call it outside the event loop.

        Args:
            since: seconds since 1970; slices that arrived before are left out.
            seconds: length of each rank's track, from the end of the rank's first slice, as the clocks of ranks differ.
        """
        slices: dict[int, list[Slice]] = {rank.rank: [] for rank in ranks}
        for when, rank, packed in list(self._models[name].slices):
            if when >= since and rank in slices:  # after a layout change, the rank may be spare
                slices[rank] += (item for item in read_slices(packed) if not _is_idle(item))
        return [Track(rank.rank, rank.stage, rank.tp_rank, _in_order(slices[rank.rank], seconds)) for rank in ranks]

    def _diagnose(self, model: ModelHistory, time_us: int) -> BottleneckReport | None:
        if model.info is None:
            return None
        others = [other.recent for other in self._models.values() if other is not model]
        begin = model.recent[0][0]
        others_ran = any(
            recent and recent[-1][0] > begin and recent[-1][1].num_steps > recent[0][1].num_steps for recent in others
        )
        return diagnose([stats for _, stats in model.recent], model.info, time_us, others_ran)

    @property
    def _is_watched(self) -> bool:
        return any(model.watchers for model in self._models.values())

    def _point(self, model: ModelHistory, stats: EngineStats, seconds: float, now: float) -> StatsPoint:
        """Make the point of the history for the latest ``stats``. Its rates cover the last ``seconds``."""
        before, name = model.last, stats.model
        num_steps = stats.num_steps - before.num_steps
        ranks_before = {rank.rank: rank for rank in before.ranks}
        running, waiting = self._count_open(name)
        minute = model.minute[0][1]
        num_queries = stats.prefix_cache_queries - minute.prefix_cache_queries
        return StatsPoint(
            time_us=round(now * 1e6),
            seconds=seconds,
            running=running,
            waiting=waiting,
            sequences=stats.running,
            kv_usage=stats.kv_usage,
            ttft=self._latencies.ttft[name].percentiles(),
            time_per_output_token=self._latencies.time_per_output_token[name].percentiles(),
            queue_time=self._latencies.queue_time[name].percentiles(),
            prefix_cache_hit_rate=(stats.prefix_cache_hits - minute.prefix_cache_hits) / num_queries
            if num_queries
            else None,
            preemptions=stats.num_preemptions - minute.num_preemptions,
            steps_per_second=num_steps / seconds,
            tokens_per_step=(stats.step_tokens - before.step_tokens) / num_steps if num_steps else 0.0,
            prompt_tokens_per_second=(stats.prompt_tokens - before.prompt_tokens) / seconds,
            generation_tokens_per_second=(stats.generation_tokens - before.generation_tokens) / seconds,
            ranks=[_rank_point(ranks_before.get(rank.rank), rank) for rank in stats.ranks],
        )


def _layout_drift(drift: Drift | None) -> LayoutDrift | None:
    if drift is None:
        return None
    return LayoutDrift(
        factors=drift.factors,
        slow_stage=drift.slow,
        slow_rank=drift.rank,
        better_layers=drift.layers or None,
        gain=drift.gain,
    )


def _is_idle(item: Slice) -> bool:
    return item.name.startswith(WAIT_PREFIX) and item.end - item.begin > IDLE_SECONDS * 1e9


def _in_order(slices: list[Slice], seconds: float) -> list[Slice]:
    """Sort trace slices by begin time, each before the slices nested in it. Leaves out slices that begin more than ``seconds``
    after the end of the first slice, which may be a long wait."""
    until = min((item.end for item in slices), default=0) + seconds * 1e9
    return sorted((item for item in slices if item.begin < until), key=lambda item: (item.begin, -item.end))


def _hand_out(model: ModelHistory, content: StatsEvent | TraceEvent) -> None:
    data = event(content)  # encoded once for all watchers
    for watcher in model.watchers:
        watcher.add(data)


def _rank_point(before: RankStats | None, rank: RankStats) -> RankPoint:
    return RankPoint(rank.rank, _busy(before, rank), rank.private_memory, rank.memory_used, rank.memory_total)


def _rank_traffic(before: RankStats | None, now: RankStats, destination: int) -> RankTraffic:
    sent, seconds, steps = now.bytes_sent[destination], 0.0, 0
    new = sent
    if before is not None:
        new -= before.bytes_sent.get(destination, 0)
        seconds, steps = now.when - before.when, now.num_steps - before.num_steps
    return RankTraffic(
        now.rank, destination, sent, new / seconds if seconds > 0 else None, new / steps if steps > 0 else None
    )


def _busy(before: RankStats | None, now: RankStats) -> float | None:
    """Busy fraction of a rank between two of its statistics reports; None if ``before`` is None."""
    if before is None or now.when <= before.when:
        return None
    return min(1.0, max(0.0, now.busy_seconds - before.busy_seconds) / (now.when - before.when))


def _trace_event(trace: Trace) -> TraceEvent:
    ranks = {rank: read_slices(packed) for rank, packed in trace.slices}
    everything = [item for slices in ranks.values() for item in slices]
    return TraceEvent(
        begin_us=min(item.begin for item in everything) // 1000 if everything else None,
        end_us=max(item.end for item in everything) // 1000 if everything else None,
        dropped=sum(packed.num_dropped for _, packed in trace.slices),
        steps=[_describe_step(step) for step in trace.steps],
        ranks=[
            RankTrace(rank, [(item.name, item.begin // 1000, item.end // 1000, item.step_id) for item in slices])
            for rank, slices in ranks.items()
        ],
    )


def _describe_step(step: TracedStep) -> Step:
    sequences = [
        StepSequence(key.partition(":")[2], tokens, context, decode) for key, tokens, context, decode in step.sequences
    ]
    return Step(step.step_id, step.num_tokens - step.num_decodes, step.num_decodes, step.num_sequences, sequences)
