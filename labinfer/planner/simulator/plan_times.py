"""PlanTimes: seconds of each phase of a micro-batch, on rank 0, in every stage and between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from labinfer.base.plan import BatchPlan


class StageTimes(NamedTuple):
    """Seconds of a micro-batch in a stage, on the slowest of its ranks."""

    prepare: float
    """Seconds to build the inputs, which needs the plan but no activations."""
    run: float
    """Seconds in the stage's layers."""
    sample: float = 0.0
    """Seconds of LM head and sampling, on the last stage."""
    send: float = 0.0
    """Seconds from the departure of the output to the end of the step."""
    lead: float = 0.0
    """Seconds from the end of the previous step or the plan's arrival, whichever is later, to the start of the step."""


class Hop(NamedTuple):
    """Seconds of a message from one rank to another."""

    transfer: float
    """Seconds for which the message occupies the link."""
    latency: float
    """Seconds from the end of the transfer to its arrival."""


class Forward(NamedTuple):
    """Forwarding of a plan by the ranks of a stage to ranks of the same or a later stage."""

    stage: int
    """Index of the sending stage. Sends of rank 0 are not forwards: they are in ``PlanTimes.deliveries``."""
    seconds: float
    """Seconds from when the sending stage takes the plan until the last receiving rank has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTimes:
    """Seconds of each phase of one micro-batch: on rank 0, in every stage and between stages."""

    schedule: float
    """Seconds of rank 0's own work, from the previous step or result until it sends the plan."""
    broadcast: float
    """Seconds to send the plan, on rank 0."""
    deliveries: Sequence[float]
    """For each stage: seconds from the start of the broadcast until the last rank that rank 0 sends to has the plan."""
    stages: Sequence[StageTimes]
    hops: Sequence[Hop]
    """Times of the send from each stage to the next; the last hop carries the tokens to rank 0."""
    forwards: Sequence[Sequence[Forward]] = ()
    """Forwards of the plan to ranks of each stage; empty if rank 0 sends it to all ranks."""
    collect: float = 0.0
    """Seconds of rank 0's own work, from the previous launch or result until it waits for this result."""


class TimeSource(Protocol):
    """Times of micro-batches, from a cost model or a recorded run."""

    def times(self, plan: BatchPlan) -> PlanTimes: ...
