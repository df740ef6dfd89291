"""A run's slices as a trace that Perfetto and chrome://tracing open, and what they add up to.

The format is Chrome's trace events, as one JSON object: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from labinfer.errors import UserError
from labinfer.observe.output_file import OutputFile
from labinfer.observe.recorder import FIELDS
from labinfer.rank_reports import Slices, WorkerStats

logger = logging.getLogger(__name__)

OF_THE_MODEL = ("run", "sample")
"""Slices in which the model's functions are at work."""
WAITS = "wait for"
"""What slices in which a rank waits for others begin with."""


class Slice(NamedTuple):
    """Some time of a rank, in nanoseconds since 1970 by the clock of its node."""

    name: str
    begin: int
    end: int
    step_id: int
    """-1 where it is of no step."""
    num_tokens: int
    num_decodes: int
    """How many of these tokens lead to the next; the others are of prompts."""


class Track(NamedTuple):
    """A rank's part of a trace."""

    rank: int
    stage: int
    tp_rank: int
    slices: list[Slice]


def read_slices(slices: Slices) -> list[Slice]:
    """In order, each before those that lie in it."""
    numbers = iter(array("q", slices.numbers))
    found = (
        Slice(slices.names[name], begin + slices.clock, end + slices.clock, *of_step)
        for name, begin, end, *of_step in zip(*[numbers] * FIELDS, strict=True)
    )
    return sorted(found, key=lambda slice: (slice.begin, -slice.end))


def own_times(slices: Iterable[Slice]) -> Counter[str]:
    """Nanoseconds by name, without the slices that lie in each; they are given in order."""
    times: Counter[str] = Counter()
    around: list[Slice] = []
    for slice in slices:
        while around and around[-1].end <= slice.begin:
            around.pop()
        if around:
            times[around[-1].name] -= slice.end - slice.begin
        times[slice.name] += slice.end - slice.begin
        around.append(slice)
    return times


def tracks_of(workers: Iterable[WorkerStats]) -> list[Track]:
    """Of workers that recorded."""
    return [Track(one.rank, one.stage, one.tp_rank, read_slices(one.slices)) for one in workers]


def write_trace(file: OutputFile, workers: Sequence[WorkerStats]) -> None:
    """Write a track for each rank, in place of what the file held.

    Where the file cannot be written, the log says so: that must not cost a run its answers.
    """
    try:
        file.begin()
        for text in trace_text(tracks_of(workers)):
            file.write(text)
    except UserError as error:
        logger.warning("%s", error)


def trace_text(tracks: Iterable[Track]) -> Iterator[str]:
    """The trace, piece by piece. Times begin with the first slice.

    The clocks of several nodes are taken as they are: tracks agree as well as these do.
    """
    tracks = list(tracks)
    start = min((track.slices[0].begin for track in tracks if track.slices), default=0)
    opening = '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for track in tracks:
        yield opening + ",\n".join(_events(track, start))
        opening = ",\n"
    yield "\n]}\n"


def _events(track: Track, start: int) -> Iterator[str]:
    of_track = {"pid": track.rank, "tid": 0}
    name = f"rank {track.rank} (stage {track.stage}, tp {track.tp_rank})"
    yield json.dumps({"ph": "M", "name": "process_name", "args": {"name": name}, **of_track})
    yield json.dumps({"ph": "M", "name": "process_sort_index", "args": {"sort_index": track.rank}, **of_track})
    yield json.dumps({"ph": "M", "name": "thread_name", "args": {"name": "steps"}, **of_track})
    for slice in track.slices:
        args = {"step": slice.step_id, "tokens": slice.num_tokens, "decodes": slice.num_decodes}
        times = {"ts": (slice.begin - start) / 1000, "dur": (slice.end - slice.begin) / 1000}
        yield json.dumps(
            {"ph": "X", "name": slice.name, **times, **of_track, "args": {} if slice.step_id < 0 else args}
        )
