"""RecordedTimes: times of a real run's micro-batches, read from its trace."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from labinfer.base.errors import UserError
from labinfer.base.plan import BatchPlan
from labinfer.observe.gantt import BUSY_SLICES
from labinfer.observe.trace import Slice, Track
from labinfer.planner.simulator.plan_times import Hop, PlanTimes, StageTimes

SECOND = 1e9
"""Nanoseconds per second."""
MAX_WORK_GAP = 2_000_000
"""Longest gap, in nanoseconds, between two slices of the engine's track, with no plan in flight, that counts as work. In a longer
gap the engine waited for requests."""

MAX_DELAY_FACTOR = 3
"""A receive shows when its message arrived only if the receive began before. It is used if it began to wait less than this multiple
of the usual transfer time after the message was sent."""


@dataclass(kw_only=True)
class _Step:
    """A recorded step of a rank; times in nanoseconds."""

    step: Slice
    plan_wait: Slice | None
    """The rank's wait for the plan; None on rank 0, which makes the plan."""
    before: int
    """Time from which the rank was free for the step: end of its previous step, or arrival of the plan of its first step."""
    parts: dict[str, Slice] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Time, in nanoseconds, at which the step's output left the stage."""
        return self.parts["send"].begin if "send" in self.parts else self.step.end


class RecordedTimes:
    """Times from a trace; see ``TimeSource``.

    A plan gets the times of the recorded step with its id. If that step is missing or has numbers of tokens or decodes that are not
    the plan's, the plan gets the times of the recorded step with the nearest numbers. A message that arrived before its receiver
    waited for it has no exact transfer time; it counts with at most the median transfer time of the other messages.

    Args:
        tracks: tracks of all ranks; see ``read_trace``.

    Raises:
        UserError: rank 0 or a stage is missing, or no step ran on all stages.
    """

    def __init__(self, tracks: Sequence[Track]):
        tracks = sorted((track for track in tracks if track.tp_rank == 0), key=lambda track: track.stage)
        rank0 = next((track for track in tracks if track.rank == 0), None)
        if rank0 is None or [track.stage for track in tracks] != list(range(len(tracks))):
            raise UserError("the trace lacks rank 0 or a stage")
        self.num_stages, self._rank0_stage = len(tracks), rank0.stage
        self._steps = [_read_steps(track) for track in tracks]
        schedules, collects, broadcasts, waits = _read_rank0(rank0)
        ids = sorted(set(broadcasts).intersection(waits, *self._steps))
        if not ids:
            raise UserError("the trace has no step that all stages ran")
        deliveries = [self._deliveries(stage, broadcasts, ids) for stage in range(self.num_stages)]
        hops = [self._hops(stage, ids) for stage in range(self.num_stages - 1)]
        hops.append(_clip({i: (waits[i].begin, waits[i].end, self._steps[-1][i].left) for i in ids}))
        self._times: dict[int, PlanTimes] = {}
        self._shapes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for i in ids:
            stages = [self._stage_times(stage, i, broadcasts[i], deliveries[stage]) for stage in range(self.num_stages)]
            self._times[i] = PlanTimes(
                schedule=schedules[i] / SECOND,
                broadcast=(broadcasts[i].end - broadcasts[i].begin) / SECOND,
                deliveries=[ways[i] / SECOND for ways in deliveries],
                stages=stages,
                hops=[Hop(0.0, ways[i] / SECOND) for ways in hops],
                collect=collects[i] / SECOND,
            )
            self._shapes[broadcasts[i].num_tokens, broadcasts[i].num_decodes].append(i)
        self._shape_by_step = {i: shape for shape, members in self._shapes.items() for i in members}
        self._nearest = cache(self._find_nearest)

    def times(self, plan: BatchPlan) -> PlanTimes:
        shape = plan.num_tokens, plan.num_decodes
        if self._shape_by_step.get(plan.step_id) == shape:
            return self._times[plan.step_id]
        members = self._nearest(shape)
        return self._times[members[min(bisect_left(members, plan.step_id), len(members) - 1)]]

    def _find_nearest(self, shape: tuple[int, int]) -> list[int]:
        """Ids of the recorded steps whose numbers of tokens and decodes are nearest to ``shape``."""
        tokens, decodes = shape
        return self._shapes[min(self._shapes, key=lambda other: abs(other[0] - tokens) + abs(other[1] - decodes))]

    def _stage_times(self, stage: int, step_id: int, broadcast: Slice, deliveries: dict[int, int]) -> StageTimes:
        step = self._steps[stage][step_id]
        ready = step.before
        if stage == self._rank0_stage:
            ready = max(ready, broadcast.end) if stage == 0 else step.step.begin
        else:
            ready = max(ready, min(step.step.begin, broadcast.begin + deliveries[step_id]))
        parts, left = step.parts, step.left
        prepared = parts.get("wait for activations")
        needs = prepared.begin if prepared else parts["prepare"].end
        started = prepared.end if prepared else needs
        ran = parts["sample"].begin if "sample" in parts else left
        return StageTimes(
            prepare=(needs - step.step.begin) / SECOND,
            run=(ran - started) / SECOND,
            sample=(left - ran) / SECOND,
            send=(step.step.end - left) / SECOND,
            lead=max(0, step.step.begin - ready) / SECOND,
        )

    def _deliveries(self, stage: int, broadcasts: dict[int, Slice], ids: Iterable[int]) -> dict[int, int]:
        """Nanoseconds from the start of each broadcast until ``stage`` had the plan, by step id. ``broadcasts`` are rank 0's
        slices."""
        if stage == self._rank0_stage:
            return dict.fromkeys(ids, 0)
        waits = {i: self._steps[stage][i].plan_wait for i in ids}
        return _clip({i: (wait.begin, wait.end, broadcasts[i].begin) for i, wait in waits.items()})

    def _hops(self, stage: int, ids: Iterable[int]) -> dict[int, int]:
        """Nanoseconds from the departure of each step's output from ``stage`` to its arrival at the next stage, by step id."""
        waits = {i: self._steps[stage + 1][i].parts["wait for activations"] for i in ids}
        return _clip({i: (wait.begin, wait.end, self._steps[stage][i].left) for i, wait in waits.items()})


def _clip(waits: dict[int, tuple[int, int, int]]) -> dict[int, int]:
    """Transfer time of each message, in nanoseconds. A message whose receiver began to wait too late (see
    ``MAX_DELAY_FACTOR``) gets at most the median transfer time.

    Args:
        waits: by step id, begin and end of the receiver's wait, and time of the send.
    """
    ways = {i: max(0, end - sent) for i, (_, end, sent) in waits.items()}
    late = [ways[i] for i, (begin, _, sent) in waits.items() if sent >= begin]
    usual = round(statistics.median(late)) if late else min(ways.values(), default=0)
    return {
        i: ways[i] if begin < sent + MAX_DELAY_FACTOR * usual else min(usual, ways[i])
        for i, (begin, _, sent) in waits.items()
    }


def _read_steps(track: Track) -> dict[int, _Step]:
    """Steps of ``track`` by step id, without steps that were recorded in part."""
    steps: dict[int, _Step] = {}
    plan_wait, before = None, None
    outer = [slice for slice in track.slices if slice.name in ("wait for a plan", "step")]
    for slice in sorted(outer, key=lambda slice: (slice.begin, slice.end)):  # a wait may have length 0
        if slice.name == "wait for a plan":
            plan_wait = slice
            continue
        first = plan_wait.end if plan_wait else slice.begin
        steps[slice.step_id] = _Step(step=slice, plan_wait=plan_wait, before=first if before is None else before)
        plan_wait, before = None, slice.end
    for slice in track.slices:
        step = steps.get(slice.step_id)
        if step is not None and step.step.begin <= slice.begin and slice.end <= step.step.end:
            step.parts[slice.name] = slice
    return {
        i: step
        for i, step in steps.items()
        if {"prepare", "run"} <= set(step.parts) and (step.plan_wait is not None or track.rank == 0)
    }


def _read_rank0(track: Track) -> tuple[dict[int, int], dict[int, int], dict[int, Slice], dict[int, Slice]]:
    """Rank 0's own work (in nanoseconds) before each broadcast and each wait for a result, by step id; then the slices of the
    broadcasts and of the waits."""
    schedules: dict[int, int] = {}
    collects: dict[int, int] = {}
    broadcasts: dict[int, Slice] = {}
    waits: dict[int, Slice] = {}
    engines = [slice for slice in track.slices if slice.name == "engine"]
    between = [after.begin - before.end for before, after in zip(engines, engines[1:], strict=False)]
    usual = round(statistics.median(between)) if between else 0
    engine, before, idle = None, None, 0
    names = (
        "engine",
        "broadcast",
        "wait for tokens",
        *["step"] * (track.stage == 0),
    )  # rank 0's steps in a later stage lie within its waits for tokens
    events = [slice for slice in track.slices if slice.name in names]
    for slice in sorted(events, key=lambda slice: (slice.begin, slice.name != "engine", slice.end)):
        if slice.name == "engine":
            in_flight = len(broadcasts) - len(waits)
            if engine is not None and not in_flight and slice.begin - engine.end > MAX_WORK_GAP:
                idle += slice.begin - engine.end - usual
            engine = slice
        elif slice.name == "step":
            before = slice.end
        else:
            if before is None:
                before = engine.begin if engine is not None else slice.begin
            (schedules if slice.name == "broadcast" else collects)[slice.step_id] = max(0, slice.begin - before - idle)
            (broadcasts if slice.name == "broadcast" else waits)[slice.step_id] = slice
            before, idle = slice.end, 0
    return schedules, collects, broadcasts, waits


def step_shapes(track: Track) -> set[tuple[int, int, int]]:
    """Step id, tokens and decodes of each recorded step in ``track``."""
    return {(slice.step_id, slice.num_tokens, slice.num_decodes) for slice in track.slices if slice.name == "run"}


def busy_fraction(track: Track, begin: int, end: int) -> float:
    """Fraction of the time from ``begin`` to ``end`` in which the rank computes, as counted by ``WorkerStats.busy_time``."""
    busy = sum(slice.end - slice.begin for slice in track.slices if slice.name in BUSY_SLICES)
    return busy / (end - begin)


def working_time(tracks: Iterable[Track]) -> tuple[int, int]:
    """Time at which the first step of any track starts, and time at which the last step or wait for tokens ends, in nanoseconds."""
    bounds = [
        (slice.begin, slice.end)
        for track in tracks
        for slice in track.slices
        if slice.name in ("step", "wait for tokens")
    ]
    return min(begin for begin, _ in bounds), max(end for _, end in bounds)
