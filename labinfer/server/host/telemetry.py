"""Telemetry: sends stats of engines and ranks to the gateway at intervals, and traces while a client watches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from labinfer.base.rank_stats import Slices, WorkerStats
from labinfer.base.speculative_options import MAX_TOKENS
from labinfer.comm.health_channel import HealthChannel
from labinfer.engine.scheduler import InFlight
from labinfer.server.host.hosted_model import HostedModel
from labinfer.server.link.frames import FromHost, StatsUpdate, Trace
from labinfer.server.link.stats import EngineStats, RankStats, TracedStep

STATS_SECONDS = 1.0
"""Seconds between two reports of statistics while there is work."""
WATCHED_SECONDS = 0.5
"""Seconds between two reports of statistics while a client watches, and after work has ended."""
IDLE_STATS = 2
"""Number of reports of statistics after work has ended. Only the second has the final statistics of the other ranks."""
WATCHED_SLICES = 640
"""Maximum number of trace slices that a rank records between two reports of statistics: the slices of about 60 steps. Later slices
are dropped, so that the cost of watching does not depend on the speed of steps."""
ALL_SLICES = 16 * WATCHED_SLICES
"""Maximum number of trace slices of all ranks and models together that are sent at a time. Decoding them must not delay the
gateway's responses, and the slices of one rank must fit into one frame of the health channel."""
WATCHED_STEPS = 64
"""Maximum number of traced steps of a model between two reports of statistics."""
SHOWN_SEQUENCES = 32
"""Maximum number of sequences that a traced step lists."""


class Telemetry:
    """Sends ``StatsUpdate`` frames, and ``Trace`` frames while a client watches. Stats of other ranks come over the health channel.
    Rank 0 requests them one interval ahead, so that it never waits for them.

    Args:
        models: all models of the group of ranks, in the order in which the ranks have loaded them.
        send: sends a frame to the gateway.
        health_channel: channel to the other ranks; None with a single rank.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        send: Callable[[FromHost], None],
        health_channel: HealthChannel | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._models, self._send, self._health_channel, self._clock = models, send, health_channel, clock
        num_ranks = len(models[0].llm.group.everyone)
        self._num_slices = min(WATCHED_SLICES, ALL_SLICES // (num_ranks * len(models)))
        self._data: dict[int, bytes] = {}  # last message of each other rank, still encoded
        self._stats: dict[int, list[WorkerStats]] = {}  # the decoded messages, with rank 0's own stats
        self._was_working = self._is_watched = False
        self._last, self._next, self._left = 0.0, 0.0, IDLE_STATS
        self._decode = msgspec.msgpack.Decoder(list[WorkerStats]).decode
        if health_channel is not None:
            health_channel.stats.clear()  # stats of a layout before the change
        self._own, self._worked = (
            self._own_stats(0),
            self._working_seconds(),
        )  # kept for one interval, as stats of other ranks are one interval old
        self._worked_before = self._worked  # seconds with work at the time when the ranks sent ``_stats``

    def watch(self, on: bool) -> None:
        """Make all ranks start or stop recording their steps."""
        self._is_watched = on
        for model in self._models:
            model.watched.clear()
            model.watched_most = WATCHED_STEPS if on else 0
        self._gather()  # drops a reply to an earlier request
        self._next, self._left = self._clock() + WATCHED_SECONDS, IDLE_STATS

    def send_if_due(self, is_working: bool) -> None:
        """Send stats and traces that are due; called between two steps.

        Args:
            is_working: whether any engine has work.
        """
        now, has_turned = self._clock(), is_working != self._was_working
        self._was_working = is_working
        self._left = IDLE_STATS if is_working or has_turned else self._left
        if has_turned and not is_working:
            self._next = min(self._next, self._last + WATCHED_SECONDS)
        is_due = now >= self._next and self._left > 0
        fresh = self._take_in(now) if is_due else []
        if is_due or has_turned:  # asked only when due: work may begin and end 100 times/s
            self._send_stats(now)
        if is_due and self._is_watched:
            self._send_trace(fresh)

    def _take_in(self, now: float) -> list[int]:
        pause = STATS_SECONDS if self._was_working and not self._is_watched else WATCHED_SECONDS
        self._last, self._next = now, now + pause
        self._left -= 1
        return self._gather()

    def _send_stats(self, now: float) -> None:
        stats = []
        for number, model in enumerate(self._models):
            ranks = [rank_stats[number] for _, rank_stats in sorted(self._stats.items())]
            if model.slowdown_detector is not None:
                model.slowdown_detector.add_stats(ranks, now)
            stats.append(_describe(model, ranks, self._worked_before[number], now))
        self._send(StatsUpdate(stats))

    def _send_trace(self, fresh: list[int]) -> None:
        """Send one ``Trace`` per model, with trace slices of the ranks ``fresh``, whose stats have just arrived."""
        for number, model in enumerate(self._models):
            trace = _trace(model, [(rank, self._stats[rank][number].slices) for rank in fresh])
            if trace.steps or trace.slices:
                self._send(trace)

    def _gather(self) -> list[int]:
        """Collect the stats that other ranks have sent, and request their next stats. Returns the ranks that have sent stats."""
        num_slices = self._num_slices if self._is_watched else 0
        self._stats[0], self._own = self._own, self._own_stats(num_slices)  # one interval old, as other ranks' are
        self._worked_before, self._worked = self._worked, self._working_seconds()
        fresh = [0]
        if self._health_channel is not None:
            for rank, data in sorted(self._health_channel.stats.items()):
                if data and data is not self._data.get(rank):
                    self._data[rank], self._stats[rank] = data, self._decode(data)
                    fresh.append(rank)
            self._health_channel.ask_stats(num_slices)
        return fresh

    def _own_stats(self, num_slices: int) -> list[WorkerStats]:
        """Stats of rank 0, one entry per model, with at most ``num_slices`` trace slices each."""
        return [model.llm.stats.report(num_slices) for model in self._models]

    def _working_seconds(self) -> list[float]:
        return [model.working_seconds for model in self._models]


def _trace(model: HostedModel, slices: list[tuple[int, Slices | None]]) -> Trace:
    steps = [_describe_step(batch) for batch in model.watched]
    model.watched.clear()
    return Trace(
        model.name, steps, [(rank, packed) for rank, packed in slices if packed is not None and packed.numbers]
    )


def _describe_step(batch: InFlight) -> TracedStep:
    plan = batch.plan
    shown = [
        (sequence.request.key, entry.num_tokens, entry.begin, entry.is_decode)
        for entry, sequence in zip(plan.entries[:SHOWN_SEQUENCES], batch.sequences, strict=False)
    ]
    return TracedStep(plan.step_id, plan.num_tokens, plan.num_decodes, len(plan.entries), shown)


def _describe(model: HostedModel, ranks: list[WorkerStats], worked: float, now: float) -> EngineStats:
    """Build the stats of a model's engine for the gateway.

    Args:
        worked: seconds in which the engine had work until ``ranks`` were taken.
    """
    engine = model.llm.engine
    counts = engine.scheduler.counts
    return EngineStats(
        model=model.name,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        running_keys=list(dict.fromkeys(sequence.request.key for sequence in engine.scheduler.running)),
        kv_usage=engine.blocks.usage,
        prefix_cache_queries=counts["looked_up"],
        prefix_cache_hits=counts["found"],
        num_preemptions=counts["preemptions"],
        prompt_tokens=model.prompt_tokens,
        generation_tokens=model.generation_tokens,
        num_steps=model.num_steps,
        step_age=now - model.last_step if engine.has_work else 0.0,
        steps_by_tokens=model.steps_by_tokens,
        step_tokens=model.step_tokens,
        num_drafts=counts["drafts"],
        drafted_tokens=counts["drafted"],
        accepted_by_place=list(itertools.takewhile(bool, (counts[f"accepted_{place}"] for place in range(MAX_TOKENS)))),
        draft_seconds=counts["draft_seconds"],
        drafter_failures=counts["drafter_failures"],
        num_swaps=counts["swaps"],
        drift=model.slowdown_detector.drift if model.slowdown_detector else None,
        ranks=[
            RankStats(
                rank=rank.rank,
                stage=rank.stage,
                tp_rank=rank.tp_rank,
                num_threads=rank.num_threads,
                cpus=rank.cpus,
                num_steps=rank.num_steps,
                busy_seconds=rank.busy_time,
                bubble_seconds=model.bubble(rank, worked),
                bytes_sent=rank.bytes_sent,
                expert_tokens=rank.expert_tokens,
                expert_reads=rank.expert_reads,
                private_memory=rank.private_memory,
                peak_memory=rank.peak_memory,
                when=rank.when,
                memory_total=rank.memory_total,
                memory_used=rank.memory_used,
                energy=rank.energy,
            )
            for rank in ranks
        ],
    )
