"""PlanTimes: seconds that the parts of a micro-batch take, on rank 0, in every stage and between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from labinfer.base.plan import BatchPlan


class StageTimes(NamedTuple):
    """Seconds of a micro-batch in a stage, on the slowest of its ranks."""

    prepare: float
    """Building the inputs, which needs the plan but no activations."""
    run: float
    """The layers."""
    sample: float = 0.0
    """Choosing tokens, on the last stage."""
    send: float = 0.0
    """From the moment at which its output leaves to the end of the step."""
    lead: float = 0.0
    """From the end of the step before, or the plan's arrival, to the begin of the step."""


class Hop(NamedTuple):
    """The way of a message to another rank, in seconds."""

    transfer: float
    """Time in which the link carries nothing else."""
    latency: float
    """From the end of the transfer to its arrival."""


class Forward(NamedTuple):
    """The way of a plan from ranks of a stage to those of the same or a later one."""

    stage: int
    """Number of the first. Rank 0 is no part of it: what it sends are deliveries."""
    seconds: float
    """From when that stage takes the plan until the last of these ranks has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTimes:
    """Seconds of one micro-batch."""

    schedule: float
    """Rank 0's own work since the step or the result before, until the plan is sent."""
    broadcast: float
    """Sending it, on rank 0."""
    deliveries: Sequence[float]
    """From the begin of the broadcast until the last rank of each stage that rank 0 sends the plan to has it."""
    stages: Sequence[StageTimes]
    hops: Sequence[Hop]
    """From each stage to the next one; the last is the way of the tokens to rank 0."""
    forwards: Sequence[Sequence[Forward]] = ()
    """Ways of the plan to ranks of each stage that others send it to; none where rank 0 sends it to all."""
    collect: float = 0.0
    """Rank 0's own work since the launch or the result before, until it waits for this result."""


class TimeSource(Protocol):
    """A model of what micro-batches cost, or times that were recorded."""

    def times(self, plan: BatchPlan) -> PlanTimes: ...
