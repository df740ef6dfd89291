"""When the next micro-batch may start: three pipeline schedules, to be measured against each other.

Each answers one question and keeps no state but its own. ``in_flight`` counts micro-batches launched and not returned.
"""

from __future__ import annotations

from typing import Protocol


class PipelineSchedule(Protocol):
    num_micro_batches: int
    """Into how many micro-batches the running sequences are divided."""

    def may_launch(self, in_flight: int) -> bool: ...


class Lockstep:
    """One batch of everything, all the way through, before the next: every stage but one is idle."""

    num_micro_batches = 1

    def may_launch(self, in_flight: int) -> bool:
        return in_flight == 0


class GPipe:
    """Fill the pipeline, drain it, fill it again (Huang et al. 2019, arXiv:1811.06965)."""

    def __init__(self, num_micro_batches: int):
        self.num_micro_batches = num_micro_batches
        self._filled = 0  # micro-batches launched since the pipeline was last empty

    def may_launch(self, in_flight: int) -> bool:
        self._filled = max(self._filled, in_flight) if in_flight else 0
        return in_flight == self._filled and in_flight < self.num_micro_batches


class OneForwardOneBack:
    """One micro-batch in for each one out, so that no stage waits (after 1F1B, Narayanan et al. 2019, SOSP PipeDream)."""

    def __init__(self, num_micro_batches: int):
        self.num_micro_batches = num_micro_batches

    def may_launch(self, in_flight: int) -> bool:
        return in_flight < self.num_micro_batches


def make_schedule(name: str, max_inflight: int) -> PipelineSchedule:
    if name == "lockstep":
        return Lockstep()
    return GPipe(max_inflight) if name == "gpipe" else OneForwardOneBack(max_inflight)
