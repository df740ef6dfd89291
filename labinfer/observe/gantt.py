"""Some steps of a run as a Gantt chart: which ones, when every rank was at work on them, and for how much of the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labinfer.errors import UserError
from labinfer.observe.trace import OF_THE_MODEL, WAITS, Slice, Track

NUM_STEPS = 30
"""In a chart: so many bars have room for their numbers over the width of a page."""
KINDS = ("prefill", "decode", "mixed")
"""Of micro-batches: tokens of prompts, tokens that lead to the next ones, or both."""
AT_WORK = ("prepare", *OF_THE_MODEL)
"""Slices in which a rank computes: those that ``WorkerStats.busy_time`` counts."""


class Bar(NamedTuple):
    """A rank at work on one micro-batch, until it waits or turns to another one. Times in nanoseconds."""

    begin: int
    end: int
    step_id: int
    kind: str
    num_tokens: int


@dataclass(frozen=True)
class Row:
    """What one rank did while the chart's steps ran. Times in nanoseconds from the beginning of the chart."""

    rank: int
    stage: int
    tp_rank: int
    bars: list[Bar]
    """Those of other steps too, which were on this rank at the same time; cut where the chart begins and ends."""
    waits: list[tuple[int, int]]
    """When it waited for others."""
    busy: float
    """Fraction of the time in bars. The rest is the bubble."""


@dataclass(frozen=True)
class Gantt:
    """From where the first of some steps began on any rank to where the last one ended."""

    steps: Sequence[int]
    """Their ids."""
    duration: int
    """Nanoseconds."""
    rows: list[Row]
    """By stage, then by rank."""
    num_tokens: dict[str, tuple[int, int]]
    """The fewest and the most tokens that these steps had, of each kind there is."""


def make_gantt(tracks: Iterable[Track], measured: Iterable[int]) -> Gantt:
    """The ``NUM_STEPS`` steps in the middle of those that were measured and that every rank has recorded.

    Raises:
        UserError: there are none, as the recorders were full before.
    """
    tracks = sorted(tracks, key=lambda track: (track.stage, track.rank))
    recorded = set.intersection(*({one.step_id for one in track.slices if one.name == "run"} for track in tracks))
    steps = [step for step in measured if step in recorded]
    if not steps:
        raise UserError("--plot: what was measured came too late to be recorded; measure or warm up less")
    first = max(0, (len(steps) - NUM_STEPS) // 2)
    steps = steps[first : first + NUM_STEPS]
    all_bars = [bars_of(track.slices) for track in tracks]
    shown = [bar for bars in all_bars for bar in bars if bar.step_id in steps]
    begin, end = min(bar.begin for bar in shown), max(bar.end for bar in shown)
    rows = [_row(track, bars, begin, end) for track, bars in zip(tracks, all_bars, strict=True)]
    sizes = {kind: [bar.num_tokens for bar in shown if bar.kind == kind] for kind in KINDS}
    return Gantt(
        steps, end - begin, rows, {kind: (min(counts), max(counts)) for kind, counts in sizes.items() if counts}
    )


def bars_of(slices: Iterable[Slice]) -> list[Bar]:
    """In order, as the slices are."""
    bars: list[Bar] = []
    goes_on = False
    for one in slices:
        if one.name.startswith(WAITS):
            goes_on = False
        elif one.name in AT_WORK:
            if goes_on and bars[-1].step_id == one.step_id:
                bars[-1] = bars[-1]._replace(end=one.end)
            else:
                bars.append(Bar(one.begin, one.end, one.step_id, kind_of(one), one.num_tokens))
            goes_on = True
    return bars


def kind_of(one: Slice) -> str:
    """One of ``KINDS``."""
    if one.num_decodes == one.num_tokens:
        return "decode"
    return "mixed" if one.num_decodes else "prefill"


def _row(track: Track, bars: list[Bar], begin: int, end: int) -> Row:
    cut = [
        bar._replace(begin=max(bar.begin, begin) - begin, end=min(bar.end, end) - begin)
        for bar in bars
        if bar.begin < end and bar.end > begin
    ]
    waits = [
        (max(one.begin, begin) - begin, min(one.end, end) - begin)
        for one in track.slices
        if one.name.startswith(WAITS) and one.begin < end and one.end > begin
    ]
    busy = sum(bar.end - bar.begin for bar in cut) / (end - begin)
    return Row(track.rank, track.stage, track.tp_rank, cut, waits, busy)
