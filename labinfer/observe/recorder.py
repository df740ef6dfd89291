"""Recorder: where the time of a rank's steps goes, slice by slice."""

from __future__ import annotations

import contextlib
import time
from array import array

from labinfer.plan import BatchPlan, Slices

CAPACITY = 200_000
"""Slices of a rank in one run: ten thousand steps and more, in 8 MB."""
FIELDS = 5
"""Numbers of a slice; see ``Slices``."""


class Recorder:
    """Keeps slices in a buffer of fixed size; what comes when it is full is only counted.

    Handed to whoever has something to record, on every rank. Work on an accelerator ends later than the slice that began it.

    Args:
        capacity: slices there is room for; with 0 nothing is recorded, at next to no cost.
    """

    def __init__(self, capacity: int = 0):
        self._capacity = capacity
        self._numbers = array("q", bytes(8 * FIELDS * capacity))
        self._names: dict[str, int] = {}
        self._count = self._num_dropped = 0
        self._nothing = contextlib.nullcontext()
        self._plan, self._num_tokens = None, 0

    def slice(self, name: str, plan: BatchPlan | None = None) -> contextlib.AbstractContextManager:
        """What is done inside the ``with`` is one slice. Slices may lie in each other.

        Args:
            plan: the step it is part of, if it is of one.
        """
        return _OpenSlice(self, name, plan) if self._capacity else self._nothing

    def add(self, name: str, begin: int, end: int, plan: BatchPlan | None) -> None:
        """One slice, in nanoseconds of ``time.perf_counter_ns``."""
        if self._count == self._capacity:
            self._num_dropped += 1
            return
        if plan is not None and plan is not self._plan:  # most slices are of the same step as the one before
            self._plan, self._num_tokens = plan, plan.num_tokens
        number = self._names.setdefault(name, len(self._names))
        at, numbers = self._count * FIELDS, self._numbers
        numbers[at], numbers[at + 1], numbers[at + 2] = number, begin, end
        numbers[at + 3], numbers[at + 4] = (-1, 0) if plan is None else (plan.step_id, self._num_tokens)
        self._count += 1

    def take(self) -> Slices | None:
        """What was recorded since the last call; None where nothing is recorded at all."""
        if not self._capacity:
            return None
        clock = time.time_ns() - time.perf_counter_ns()
        taken = Slices(list(self._names), self._numbers[: self._count * FIELDS].tolist(), clock, self._num_dropped)
        self._count = self._num_dropped = 0
        return taken


class _OpenSlice:
    __slots__ = ("_recorder", "_name", "_plan", "_begin")

    def __init__(self, recorder: Recorder, name: str, plan: BatchPlan | None):
        self._recorder, self._name, self._plan = recorder, name, plan

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(self, kind, error, traceback) -> None:
        self._recorder.add(self._name, self._begin, time.perf_counter_ns(), self._plan)
