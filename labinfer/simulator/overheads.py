"""Overheads: seconds of a step outside the model, which no probe of a host measures."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.plan import BatchPlan

PLAN_BYTES, ENTRY_BYTES, TOKEN_BYTES = 32, 24, 3
"""Bytes of a plan, of an entry, and of a prompt's token in it, as they usually are."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds. The defaults were measured with two to seventeen ranks on one machine of 2.1 GHz; see decision 0045."""

    schedule: float = 300e-6
    """Scheduling on rank 0, and taking a result back, however many sequences there are."""
    schedule_sequence: float = 20e-6
    """The same for each sequence of a micro-batch, with what becomes of its token."""
    schedule_token: float = 0.5e-6
    """The same for each token of a new prompt."""
    broadcast: float = 60e-6
    """Encoding a plan on rank 0."""
    send_plan: float = 20e-6
    """Sending it to one rank."""
    delivery: float = 100e-6
    """From the end of a plan's sending within one machine until it is decoded."""
    lead: float = 60e-6
    """From one step of a stage to the next."""
    prepare: float = 100e-6
    """Building a step's inputs, beside ``HostCosts.fixed``."""
    prepare_sequence: float = 3e-6
    """The same for each sequence."""
    send: float = 200e-6
    """Sending activations or tokens, on a stage of several."""

    def schedule_seconds(self, plan: BatchPlan) -> float:
        """Seconds of rank 0 until it can send a plan."""
        num_started = sum(len(start.token_ids) for start in plan.starts)
        return self.schedule + self.schedule_sequence * len(plan.entries) + self.schedule_token * num_started


def plan_bytes(plan: BatchPlan) -> int:
    """Bytes of a plan on its way, approximately."""
    num_started = sum(len(start.token_ids) for start in plan.starts)
    return PLAN_BYTES + ENTRY_BYTES * len(plan.entries) + TOKEN_BYTES * num_started
