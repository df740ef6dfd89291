"""A run's slices as a trace that Perfetto and chrome://tracing open, and what they add up to.

The format is Chrome's trace events, as one JSON object: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from labinfer.errors import UserError
from labinfer.observe.output_file import OutputFile
from labinfer.observe.recorder import FIELDS
from labinfer.plan import Slices, WorkerStats

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


def read_slices(slices: Slices) -> list[Slice]:
    """In order, each before those that lie in it."""
    numbers = iter(slices.numbers)
    found = (
        Slice(slices.names[name], begin + slices.clock, end + slices.clock, step_id, num_tokens)
        for name, begin, end, step_id, num_tokens in zip(*[numbers] * FIELDS, strict=True)
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


def write_trace(file: OutputFile, workers: Sequence[WorkerStats]) -> None:
    """Write a track for each rank, in place of what the file held. Times begin with the first slice.

    The clocks of several nodes are taken as they are: tracks agree as well as these do. Where the file cannot be written,
    the log says so: that must not cost a run its answers.
    """
    try:
        _write(file, workers)
    except UserError as error:
        logger.warning("%s", error)


def _write(file: OutputFile, workers: Sequence[WorkerStats]) -> None:
    of_rank = [read_slices(worker.slices) for worker in workers]
    start = min((slices[0].begin for slices in of_rank if slices), default=0)
    file.begin()
    opening = '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for worker, slices in zip(workers, of_rank, strict=True):
        file.write(opening + ",\n".join(_events(worker, slices, start)))
        opening = ",\n"
    file.write("\n]}\n")


def _events(worker: WorkerStats, slices: list[Slice], start: int) -> Iterator[str]:
    track = {"pid": worker.rank, "tid": 0}
    name = f"rank {worker.rank} (stage {worker.stage}, tp {worker.tp_rank})"
    yield json.dumps({"ph": "M", "name": "process_name", "args": {"name": name}, **track})
    yield json.dumps({"ph": "M", "name": "process_sort_index", "args": {"sort_index": worker.rank}, **track})
    for slice in slices:
        args = {} if slice.step_id < 0 else {"step": slice.step_id, "tokens": slice.num_tokens}
        times = {"ts": (slice.begin - start) / 1000, "dur": (slice.end - slice.begin) / 1000}
        yield json.dumps({"ph": "X", "name": slice.name, **times, **track, "args": args})
