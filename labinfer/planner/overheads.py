"""Overheads: seconds of a step spent outside the model."""

from __future__ import annotations

import msgspec

from labinfer.base.plan import BatchPlan

PLAN_BYTES, ENTRY_BYTES, TOKEN_BYTES = 32, 24, 3
"""Typical serialized bytes of a plan without entries, of an entry, and of a prompt token."""


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent outside the model, on one machine. A probe measures ``broadcast``, ``decode`` and
    ``prepare_sequence``; the defaults were measured with two to seventeen ranks on one machine of 2.1 GHz, see decision
    0045."""

    schedule: float = 300e-6
    """Constant part of the seconds that rank 0 takes to schedule a step and to process its result."""
    schedule_sequence: float = 20e-6
    """Seconds that rank 0 takes per sequence of a step to schedule it and to process its token."""
    schedule_token: float = 0.5e-6
    """Seconds of scheduling per token of a new prompt."""
    broadcast: float = 60e-6
    """Seconds to serialize a plan on rank 0, before it is sent."""
    send_plan: float = 20e-6
    """Seconds to send a plan to one rank."""
    delivery: float = 60e-6
    """Seconds from the end of sending a plan to its arrival, within one machine."""
    decode: float = 40e-6
    """Seconds to deserialize a plan on the receiving rank."""
    lead: float = 60e-6
    """Seconds between two steps of a stage."""
    prepare_sequence: float = 3e-6
    """Seconds to build a step's inputs, per sequence after the first; ``HostCosts.fixed`` includes the first one."""
    send: float = 200e-6
    """Seconds to send activations or tokens, if there are several stages."""

    def plan_seconds(self, num_sequences: float, num_started: int = 0) -> float:
        """Seconds of scheduling on rank 0 until it can send a plan.

        Args:
            num_started: tokens of new prompts in the plan.
        """
        return self.schedule + self.schedule_sequence * num_sequences + self.schedule_token * num_started

    @property
    def arrival_seconds(self) -> float:
        """Seconds from the end of sending a plan until it is deserialized, within one machine."""
        return self.delivery + self.decode

    def prepare_seconds(self, num_sequences: float) -> float:
        """Extra seconds to build the inputs of ``num_sequences`` sequences rather than one."""
        return self.prepare_sequence * max(0, num_sequences - 1)


def count_started(plan: BatchPlan) -> int:
    """Tokens of the new prompts in a plan."""
    return sum(len(start.token_ids) for start in plan.starts)


def plan_bytes(plan: BatchPlan) -> int:
    """Approximate serialized bytes of a plan."""
    return PLAN_BYTES + ENTRY_BYTES * len(plan.entries) + TOKEN_BYTES * count_started(plan)
