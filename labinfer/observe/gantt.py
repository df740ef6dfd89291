"""Gantt: data of a chart that shows the work of every rank on some steps of a run, and each rank's busy fraction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labinfer.base.errors import UserError
from labinfer.observe.trace import MODEL_SLICES, WAIT_PREFIX, Slice, Track

NUM_STEPS = 30
"""Number of steps in a chart: on a page, 30 bars are wide enough for their step ids."""
KINDS = ("prefill", "decode", "mixed")
"""Kinds of micro-batches: prompt tokens only, decode tokens only, or both."""
BUSY_SLICES = ("prepare", *MODEL_SLICES)
"""Names of the trace slices that count as work of a rank, as in ``WorkerStats.busy_time``."""


class Bar(NamedTuple):
    """Uninterrupted work of a rank on one micro-batch. Times are in nanoseconds."""

    begin: int
    end: int
    step_id: int
    kind: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """Work and waits of one rank in a chart. Times in nanoseconds from the start of the chart."""

    rank: int
    stage: int
    tp_rank: int
    bars: list[Bar]
    """Bars of the rank in order of time, clipped to the chart."""
    waits: list[tuple[int, int]]
    """Begin and end of each wait of the rank for other ranks."""
    busy: float
    """Fraction of the chart's duration in which the rank works; the rest is the bubble."""


@dataclass(frozen=True)
class Gantt:
    """A chart of consecutive steps, from the beginning of the first step on any rank to the end of the last step on any rank."""

    steps: Sequence[int]
    """Ids of the chart's steps."""
    duration: int
    """Duration of the chart in nanoseconds."""
    rows: list[Row]
    """One row per rank, sorted by stage and rank."""
    num_tokens: dict[str, tuple[int, int]]
    """Minimum and maximum number of tokens of a step, for each kind of micro-batch in the chart."""


def make_gantt(tracks: Iterable[Track], measured: Iterable[int]) -> Gantt:
    """Make a chart of the middle ``NUM_STEPS`` of the measured steps, among those that every rank has recorded.

    Args:
        measured: ids of the measured steps.

    Raises:
        UserError: no measured step was recorded by every rank, as the ranks' recorders were already full.
    """
    tracks = sorted(tracks, key=lambda track: (track.stage, track.rank))
    recorded = set.intersection(*({slice.step_id for slice in track.slices if slice.name == "run"} for track in tracks))
    steps = [step for step in measured if step in recorded]
    if not steps:
        raise UserError("--plot: the measured steps exceed the size of the recorder; use fewer requests or warm-ups")
    first = max(0, (len(steps) - NUM_STEPS) // 2)
    steps = steps[first : first + NUM_STEPS]
    all_bars = [make_bars(track.slices) for track in tracks]
    shown = [bar for bars in all_bars for bar in bars if bar.step_id in steps]
    begin, end = min(bar.begin for bar in shown), max(bar.end for bar in shown)
    rows = [_row(track, bars, begin, end) for track, bars in zip(tracks, all_bars, strict=True)]
    sizes = {kind: [bar.num_tokens for bar in shown if bar.kind == kind] for kind in KINDS}
    return Gantt(
        steps, end - begin, rows, {kind: (min(counts), max(counts)) for kind, counts in sizes.items() if counts}
    )


def make_bars(slices: Iterable[Slice]) -> list[Bar]:
    """Bars of one rank: consecutive trace slices of work on one micro-batch are merged.

    Args:
        slices: slices of one rank, sorted by time.
    """
    bars: list[Bar] = []
    goes_on = False
    for slice in slices:
        if slice.name.startswith(WAIT_PREFIX):
            goes_on = False
        elif slice.name in BUSY_SLICES:
            if goes_on and bars[-1].step_id == slice.step_id:
                bars[-1] = bars[-1]._replace(end=slice.end)
            else:
                bars.append(Bar(slice.begin, slice.end, slice.step_id, micro_batch_kind(slice), slice.num_tokens))
            goes_on = True
    return bars


def micro_batch_kind(slice: Slice) -> str:
    """Kind (one of ``KINDS``) of the micro-batch that a trace slice belongs to."""
    if slice.num_decodes == slice.num_tokens:
        return "decode"
    return "mixed" if slice.num_decodes else "prefill"


def _row(track: Track, bars: list[Bar], begin: int, end: int) -> Row:
    cut = [
        bar._replace(begin=max(bar.begin, begin) - begin, end=min(bar.end, end) - begin)
        for bar in bars
        if bar.begin < end and bar.end > begin
    ]
    waits = [
        (max(slice.begin, begin) - begin, min(slice.end, end) - begin)
        for slice in track.slices
        if slice.name.startswith(WAIT_PREFIX) and slice.begin < end and slice.end > begin
    ]
    busy = sum(bar.end - bar.begin for bar in cut) / (end - begin)
    return Row(rank=track.rank, stage=track.stage, tp_rank=track.tp_rank, bars=cut, waits=waits, busy=busy)
