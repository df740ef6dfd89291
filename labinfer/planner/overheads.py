"""Overheads: seconds of a step outside the model."""

from __future__ import annotations

import msgspec

from labinfer.base.plan import BatchPlan

PLAN_BYTES, ENTRY_BYTES, TOKEN_BYTES = 32, 24, 3
"""Bytes of a plan, of an entry, and of a prompt's token in it, as they usually are."""


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds on one machine. A probe measures ``broadcast``, ``decode`` and ``prepare_sequence``; the defaults were measured with
    two to seventeen ranks on one machine of 2.1 GHz, see decision 0045."""

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
    delivery: float = 60e-6
    """From the end of a plan's sending within one machine until it has arrived."""
    decode: float = 40e-6
    """Decoding it there."""
    lead: float = 60e-6
    """From one step of a stage to the next."""
    prepare_sequence: float = 3e-6
    """Building a step's inputs for each sequence but the first, which ``HostCosts.fixed`` has."""
    send: float = 200e-6
    """Sending activations or tokens, on a stage of several."""

    def plan_seconds(self, num_sequences: float, num_started: int = 0) -> float:
        """Seconds of rank 0 until it can send a plan.

        Args:
            num_started: tokens of the new prompts in it.
        """
        return self.schedule + self.schedule_sequence * num_sequences + self.schedule_token * num_started

    @property
    def arrival_seconds(self) -> float:
        """Seconds from the end of a plan's sending within one machine until it is decoded."""
        return self.delivery + self.decode

    def prepare_seconds(self, num_sequences: float) -> float:
        """Seconds in which inputs of a step take longer than those of a step of one sequence."""
        return self.prepare_sequence * max(0, num_sequences - 1)


def count_started(plan: BatchPlan) -> int:
    """Tokens of the new prompts in a plan."""
    return sum(len(start.token_ids) for start in plan.starts)


def plan_bytes(plan: BatchPlan) -> int:
    """Bytes of a plan on its way, approximately."""
    return PLAN_BYTES + ENTRY_BYTES * len(plan.entries) + TOKEN_BYTES * count_started(plan)
