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
    """Seconds at the end of the step, in which the stage sends the micro-batch's output."""
    lead: float = 0.0
    """Seconds from the later of two times to the start of the step: the end of the stage's previous step, and the arrival of the
    plan."""


class Hop(NamedTuple):
    """Seconds of a message from one rank to another."""

    transfer: float
    """Seconds for which the message occupies the link."""
    latency: float
    """Seconds from the end of the transfer to the arrival of the message."""


class Forward(NamedTuple):
    """Forwarding of a plan by the ranks of a stage to ranks of the same or a later stage."""

    stage: int
    """Index of the sending stage. Sends of rank 0 are in ``PlanTimes.deliveries``."""
    seconds: float
    """Seconds from when the sending stage takes the plan until the last receiving rank has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTimes:
    """Seconds of each phase of one micro-batch: on rank 0, in every stage and between stages."""

    schedule: float
    """Seconds of rank 0's own work before it sends the plan, since its previous step or since the previous result arrived."""
    broadcast: float
    """Seconds in which rank 0 sends the plan."""
    deliveries: Sequence[float]
    """For each stage: seconds from the start of the broadcast until the plan has arrived at all ranks of the stage that rank 0
    sends it to."""
    stages: Sequence[StageTimes]
    hops: Sequence[Hop]
    """Times of the send of activations from each stage to the next; the last entry is the send of tokens to rank 0."""
    forwards: Sequence[Sequence[Forward]] = ()
    """Forwards of the plan to ranks of each stage; empty if rank 0 sends it to all ranks."""
    collect: float = 0.0
    """Seconds of rank 0's own work before it waits for the result of this micro-batch, since it launched the previous plan or since
    the previous result arrived."""


class TimeSource(Protocol):
    """Times of micro-batches, from a cost model or a recorded run."""

    def times(self, plan: BatchPlan) -> PlanTimes: ...
