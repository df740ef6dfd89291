"""Traces: the trace slices (named intervals of time) of all ranks, as a file for Perfetto and chrome://tracing, and summed by name.

The format is Chrome's trace events, as one JSON object: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.rank_stats import Slices, WorkerStats
from labinfer.observe.output_file import OutputFile
from labinfer.observe.recorder import FIELDS

logger = logging.getLogger(__name__)

MODEL_SLICES = ("run", "sample")
"""Names of the trace slices in which a rank runs the model."""
WAIT_PREFIX = "wait for"
"""Prefix of the names of trace slices in which a rank waits for another rank."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A trace slice: a named interval of a rank's time, in nanoseconds since 1970 by the clock of the rank's node."""

    name: str
    begin: int
    end: int
    step_id: int
    """Id of the step that the interval belongs to; -1 outside of all steps."""
    num_tokens: int
    """Number of tokens in the step."""
    num_decodes: int
    """Number of decode tokens in the step; all other tokens are prefill."""


class Track(NamedTuple):
    """The trace slices of one rank, in order of time."""

    rank: int
    stage: int
    tp_rank: int
    slices: list[Slice]


def read_slices(slices: Slices) -> list[Slice]:
    """Decode recorded trace slices. The result is sorted by begin; a slice precedes the slices that are nested in it."""
    numbers = iter(array("q", slices.numbers))
    decoded = (
        Slice(
            name=slices.names[name],
            begin=begin + slices.clock,
            end=end + slices.clock,
            step_id=step_id,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
        )
        for name, begin, end, step_id, num_tokens, num_decodes in zip(*[numbers] * FIELDS, strict=True)
    )
    return sorted(decoded, key=lambda slice: (slice.begin, -slice.end))


def own_times(slices: Iterable[Slice]) -> Counter[str]:
    """Total time of the trace slices of each name, in nanoseconds. Time in nested slices counts only for the nested ones.

    Args:
        slices: slices in the order of ``read_slices``.
    """
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


def make_tracks(workers: Iterable[WorkerStats]) -> list[Track]:
    """Make the track of every rank; every rank must have recorded trace slices."""
    return [Track(worker.rank, worker.stage, worker.tp_rank, read_slices(worker.slices)) for worker in workers]


def write_trace(file: OutputFile, workers: Sequence[WorkerStats], facts: dict[str, Any] | None = None) -> None:
    """Write a trace with a track for each rank, in place of the file's earlier content.

    If writing fails, the error is only logged, so that the answers of the run are not lost.

    Args:
        facts: fields of the engine's ``EngineSpec``, which a replay of the trace by ``simulate`` needs.
    """
    try:
        file.begin()
        for text in trace_text(make_tracks(workers), facts):
            file.write(text)
    except UserError as error:
        logger.warning("%s", error)


def trace_text(tracks: Iterable[Track], facts: dict[str, Any] | None = None) -> Iterator[str]:
    """Yield the trace as pieces of JSON text. Time 0 is the beginning of the first trace slice.

    Tracks of different nodes are aligned only as well as the nodes' clocks.
    """
    tracks = list(tracks)
    start = min((track.slices[0].begin for track in tracks if track.slices), default=0)
    other = f'"otherData": {json.dumps({"facts": facts})}, ' if facts else ""
    opening = f'{{"displayTimeUnit": "ms", {other}"traceEvents": [\n'
    for track in tracks:
        yield opening + ",\n".join(_events(track, start))
        opening = ",\n"
    yield "\n]}\n"


def _events(track: Track, start: int) -> Iterator[str]:
    ids = {"pid": track.rank, "tid": 0}
    name = f"rank {track.rank} (stage {track.stage}, tp {track.tp_rank})"
    yield json.dumps({"ph": "M", "name": "process_name", "args": {"name": name}, **ids})
    yield json.dumps({"ph": "M", "name": "process_sort_index", "args": {"sort_index": track.rank}, **ids})
    yield json.dumps({"ph": "M", "name": "thread_name", "args": {"name": "steps"}, **ids})
    for slice in track.slices:
        args = {"step": slice.step_id, "tokens": slice.num_tokens, "decodes": slice.num_decodes}
        times = {"ts": (slice.begin - start) / 1000, "dur": (slice.end - slice.begin) / 1000}
        yield json.dumps({"ph": "X", "name": slice.name, **times, **ids, "args": {} if slice.step_id < 0 else args})


def read_trace(path: str) -> tuple[list[Track], dict[str, Any]]:
    """Read a file of ``write_trace``. Returns the track of each rank, and the ``facts``. Times count from the beginning of the
    first trace slice.

    Raises:
        UserError: the file cannot be read, or holds no such trace.
    """
    try:
        trace = msgspec.json.decode(Path(path).read_bytes(), type=_TraceFile)
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a trace written by --trace: {error}") from None
    places: dict[int, tuple[int, int]] = {}
    slices: defaultdict[int, list[Slice]] = defaultdict(list)
    for event in trace.traceEvents:
        if event.name == "process_name":
            if match := TRACK_NAME.fullmatch(str(event.args.get("name"))):
                places[event.pid] = int(match[1]), int(match[2])
        elif event.ph == "X":
            slices[event.pid].append(_read_slice(path, event))
    if not places or not any(slice.step_id >= 0 for track in slices.values() for slice in track):
        raise UserError(f"{path} is not a trace written by --trace: it has no step of any rank")
    tracks = [
        Track(rank, stage, tp_rank, sorted(slices[rank], key=lambda slice: (slice.begin, -slice.end)))
        for rank, (stage, tp_rank) in sorted(places.items())
    ]
    return tracks, trace.otherData.get("facts") or {}


def _read_slice(path: str, event: _Event) -> Slice:
    """Convert an event of a trace file to a trace slice.

    Raises:
        UserError: the event's numbers are invalid.
    """
    values = [event.args.get(name, default) for name, default in (("step", -1), ("tokens", 0), ("decodes", 0))]
    if not all(type(value) is int for value in values) or not (
        abs(event.ts) < MAX_TIMESTAMP and 0 <= event.dur < MAX_TIMESTAMP
    ):
        raise UserError(
            f"{path} is not a trace written by --trace: the slice {event.name!r} at {event.ts:g} has {event.args} "
            f"and lasts {event.dur:g}; give whole numbers, and times in microseconds"
        )
    begin, (step_id, num_tokens, num_decodes) = round(event.ts * 1000), values
    return Slice(
        name=event.name,
        begin=begin,
        end=begin + round(event.dur * 1000),
        step_id=step_id,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
    )


MAX_TIMESTAMP = 1e15
"""Maximum timestamp of an event in a trace file, in microseconds: some decades."""
TRACK_NAME = re.compile(r"rank \d+ \(stage (\d+), tp (\d+)\)")
"""Pattern of the names that ``write_trace`` gives to the tracks of ranks."""


class _Event(msgspec.Struct, kw_only=True):
    ph: str
    name: str
    pid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _TraceFile(msgspec.Struct):
    traceEvents: list[_Event]
    otherData: dict[str, Any] = {}
