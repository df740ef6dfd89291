"""PlanTimes: seconds of each phase of a micro-batch, on rank 0, in every stage and between stages."""

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
    """Seconds in the stage's layers."""
    sample: float = 0.0
    """LM head and sampling, on the last stage."""
    send: float = 0.0
    """From the departure of the output to the end of the step."""
    lead: float = 0.0
    """From the end of the previous step, or the plan's arrival, to the start of the step."""


class Hop(NamedTuple):
    """Seconds of a message from one rank to another."""

    transfer: float
    """Time for which the message occupies the link."""
    latency: float
    """From the end of the transfer to its arrival."""


class Forward(NamedTuple):
    """Forwarding of a plan by the ranks of a stage to ranks of the same or a later stage."""

    stage: int
    """Index of the sending stage. Sends of rank 0 are not forwards: they are in ``PlanTimes.deliveries``."""
    seconds: float
    """From when the sending stage takes the plan until the last receiving rank has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTimes:
    """Seconds of each phase of one micro-batch: on rank 0, in every stage and between stages."""

    schedule: float
    """Rank 0's own work from the previous step or result until it sends the plan."""
    broadcast: float
    """Sending the plan, on rank 0."""
    deliveries: Sequence[float]
    """From the start of the broadcast until the last rank to which rank 0 sends in each stage has the plan."""
    stages: Sequence[StageTimes]
    hops: Sequence[Hop]
    """From each stage to the next; the last hop carries the tokens to rank 0."""
    forwards: Sequence[Sequence[Forward]] = ()
    """Forwards of the plan to ranks of each stage; empty if rank 0 sends it to all ranks."""
    collect: float = 0.0
    """Rank 0's own work from the previous launch or result until it waits for this result."""


class TimeSource(Protocol):
    """Times of micro-batches, from a cost model or a recorded run."""

    def times(self, plan: BatchPlan) -> PlanTimes: ...
