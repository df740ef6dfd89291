"""Tracer: records named slices (intervals) of a rank's time. This base class records none; ``observe.recorder.Recorder`` does."""

from __future__ import annotations

import contextlib

from labinfer.base.plan import BatchPlan
from labinfer.base.rank_stats import Slices

_NOTHING = contextlib.nullcontext()


class Tracer:
    """Records named slices (intervals) of a rank's time. This base class records nothing."""

    capacity = 0
    """Maximum number of slices to keep. Any thread may change it at any time."""

    def slice(self, name: str, plan: BatchPlan | None = None) -> contextlib.AbstractContextManager:
        """Time the body of the ``with`` as a slice. Slices may be nested.

        Args:
            plan: the step that the slice belongs to; None outside any step.
        """
        return _NOTHING

    def add(self, name: str, begin: int, end: int, plan: BatchPlan | None) -> None:
        """Add a slice from ``begin`` to ``end``, in nanoseconds of ``time.perf_counter_ns``."""

    def take(self) -> Slices | None:
        """Slices recorded since the last call; None if this tracer records nothing."""
        return None
