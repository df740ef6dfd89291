"""Recorder: where the time of a rank's steps goes, slice by slice."""

from __future__ import annotations

import contextlib
import time
from array import array

from labinfer.plan import BatchPlan
from labinfer.rank_reports import Slices

CAPACITY = 200_000
"""Slices of a rank in one run: ten thousand steps and more, in 10 MB."""
FIELDS = 6
"""Numbers of a slice; see ``Slices``."""
NO_STEP = (-1, 0, 0)
"""What a slice that is of no step has of it."""


class Recorder:
    """Keeps slices up to a number; what comes when there are as many is only counted.

    Handed to whoever has something to record, on every rank. Work on an accelerator ends later than the slice that began it.

    Args:
        capacity: how many; with 0 nothing is recorded, at next to no cost.
    """

    def __init__(self, capacity: int = 0):
        self.capacity = capacity
        """May be set at any time, by any thread."""
        self._numbers = array("q")
        self._names: dict[str, int] = {}
        self._num_dropped = self._num_told = 0
        self._nothing = contextlib.nullcontext()
        self._plan, self._of_plan = None, NO_STEP

    def slice(self, name: str, plan: BatchPlan | None = None) -> contextlib.AbstractContextManager:
        """What is done inside the ``with`` is one slice. Slices may lie in each other.

        Args:
            plan: the step it is part of, if it is of one.
        """
        return _OpenSlice(self, name, plan) if self.capacity else self._nothing

    def add(self, name: str, begin: int, end: int, plan: BatchPlan | None) -> None:
        """One slice, in nanoseconds of ``time.perf_counter_ns``."""
        if len(self._numbers) >= self.capacity * FIELDS:
            self._num_dropped += 1
            return
        if plan is not None and plan is not self._plan:  # most slices are of the same step as the one before
            self._plan, self._of_plan = plan, (plan.step_id, plan.num_tokens, plan.num_decodes)
        number = self._names.setdefault(name, len(self._names))
        of_plan = NO_STEP if plan is None else self._of_plan
        self._numbers.extend(
            (number, begin, end, *of_plan)
        )  # one call: another thread sees the whole slice, or nothing

    def take(self) -> Slices | None:
        """What was recorded since the last call, which may be another thread's; None where nothing is recorded at all."""
        taken = self._numbers[:]
        del self._numbers[: len(taken)]  # others may have come meanwhile
        num_dropped = self._num_dropped - self._num_told
        self._num_told += num_dropped
        if not self.capacity:  # and what came just before it was turned off is of no use when it is on again
            return None
        clock = max(time.time_ns() - time.perf_counter_ns() for _ in range(3))  # one that was interrupted is less
        return Slices(list(self._names), taken.tobytes(), clock, num_dropped)


class _OpenSlice:
    __slots__ = ("_recorder", "_name", "_plan", "_begin")

    def __init__(self, recorder: Recorder, name: str, plan: BatchPlan | None):
        self._recorder, self._name, self._plan = recorder, name, plan

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(self, kind, error, traceback) -> None:
        self._recorder.add(self._name, self._begin, time.perf_counter_ns(), self._plan)
