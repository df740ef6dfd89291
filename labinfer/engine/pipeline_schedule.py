"""Pipeline schedules: when the next micro-batch may start. 1F1B, GPipe and lock-step ship."""

from __future__ import annotations


class PipelineSchedule:
    """Decides when the next micro-batch may start. Each engine has one object, on rank 0; the simulator makes its own.

    ``in_flight`` counts micro-batches that were launched and have not returned. ``target`` is the number of micro-batches
    that the running sequences are best divided into: by default the number of stages, at most ``--max-inflight``.
    """

    has_steady_state = True
    """Whether the pipeline stays full: a micro-batch starts for each one that returns. Then ``--batch-policy auto`` is ``throttle``."""

    def num_micro_batches(self, target: int) -> int:
        """Number of micro-batches that the running sequences are divided into; at least 1."""
        return target

    def may_launch(self, in_flight: int, target: int) -> bool:
        """Whether another micro-batch may start now. Must be True if none is in flight, or the engine would stall."""
        raise NotImplementedError


class Lockstep(PipelineSchedule):
    """Run one batch through all stages before the next one starts: all stages but one are idle."""

    has_steady_state = False

    def num_micro_batches(self, target: int) -> int:
        return 1

    def may_launch(self, in_flight: int, target: int) -> bool:
        return in_flight == 0


class GPipe(PipelineSchedule):
    """Fill the pipeline, drain it, fill it again (Huang et al. 2019, arXiv:1811.06965)."""

    has_steady_state = False

    def __init__(self) -> None:
        self._filled = 0  # micro-batches launched since the pipeline was last empty

    def may_launch(self, in_flight: int, target: int) -> bool:
        self._filled = max(self._filled, in_flight) if in_flight else 0
        return in_flight == self._filled and in_flight < target


class OneForwardOneBack(PipelineSchedule):
    """Launch one micro-batch for each one that returns, so that no stage waits (after 1F1B, Narayanan et al. 2019, SOSP PipeDream)."""

    def may_launch(self, in_flight: int, target: int) -> bool:
        return in_flight < target
