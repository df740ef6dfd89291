"""Recorder: records what a rank does as trace slices, that is, named intervals of time."""

from __future__ import annotations

import contextlib
import time
from array import array

from labinfer.base.plan import BatchPlan
from labinfer.base.rank_stats import Slices
from labinfer.base.tracer import Tracer

CAPACITY = 200_000
"""Maximum number of trace slices of a rank in a run. They take 10 MB and suffice for over 10,000 steps."""
FIELDS = 6
"""Number of integers that represent one trace slice; see ``Slices``."""
NO_STEP = (-1, 0, 0)
"""Step id, number of tokens, and number of decode tokens for a trace slice outside of all steps."""


class Recorder(Tracer):
    """Records trace slices of a rank, up to ``capacity``; later slices are only counted. A slice that launches work on an
    accelerator may end before the accelerator finishes that work.

    Args:
        capacity: maximum number of slices; 0 records nothing, at almost no cost.
    """

    def __init__(self, capacity: int = 0):
        self.capacity = capacity
        self._numbers = array("q")
        self._names: dict[str, int] = {}
        self._num_dropped = self._num_dropped_taken = 0
        self._plan, self._step = None, NO_STEP

    def slice(self, name: str, plan: BatchPlan | None = None) -> contextlib.AbstractContextManager:
        return _OpenSlice(self, name, plan) if self.capacity else super().slice(name)

    def add(self, name: str, begin: int, end: int, plan: BatchPlan | None) -> None:
        if len(self._numbers) >= self.capacity * FIELDS:
            self._num_dropped += 1
            return
        if plan is not None and plan is not self._plan:  # most slices belong to the step of the slice before
            self._plan, self._step = plan, (plan.step_id, plan.num_tokens, plan.num_decodes)
        number = self._names.setdefault(name, len(self._names))
        step = NO_STEP if plan is None else self._step
        self._numbers.extend(
            (number, begin, end, *step)
        )  # one call, so that another thread sees the whole slice or nothing of it

    def take(self) -> Slices | None:
        """Return the trace slices recorded since the last call; None while ``capacity`` is 0. Another thread may call it."""
        taken = self._numbers[:]
        del self._numbers[: len(taken)]  # the recording thread may have added slices meanwhile
        num_dropped = self._num_dropped - self._num_dropped_taken
        self._num_dropped_taken += num_dropped
        if not self.capacity:  # recording was turned off: drop earlier slices
            return None
        clock = max(time.time_ns() - time.perf_counter_ns() for _ in range(3))  # an interruption lowers it
        return Slices(names=list(self._names), numbers=taken.tobytes(), clock=clock, num_dropped=num_dropped)


class _OpenSlice:
    __slots__ = ("_recorder", "_name", "_plan", "_begin")

    def __init__(self, recorder: Recorder, name: str, plan: BatchPlan | None):
        self._recorder, self._name, self._plan = recorder, name, plan

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(self, kind, error, traceback) -> None:
        self._recorder.add(self._name, self._begin, time.perf_counter_ns(), self._plan)
