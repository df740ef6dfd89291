"""Overheads: seconds of a step spent outside the model."""

from __future__ import annotations

import msgspec

from labinfer.base.plan import BatchPlan

PLAN_BYTES, ENTRY_BYTES, TOKEN_BYTES = 32, 24, 3
"""Typical serialized bytes of a plan without entries, of an entry, and of a prompt token."""


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent outside the model, on one machine. A probe measures ``broadcast``, ``decode`` and ``prepare_sequence``; the
    other fields keep their defaults, which were measured with 2 to 17 ranks on one 2.1 GHz machine (decision 0045)."""

    schedule: float = 300e-6
    """Constant part of the seconds that rank 0 takes to schedule a step and to process its result."""
    schedule_sequence: float = 20e-6
    """Seconds that rank 0 takes per sequence of a step to schedule it and to process its token."""
    schedule_token: float = 0.5e-6
    """Seconds of scheduling per token of a new prompt."""
    broadcast: float = 60e-6
    """Seconds to serialize a plan on rank 0, before rank 0 sends it."""
    send_plan: float = 20e-6
    """Seconds in which a rank sends a plan to one other rank."""
    delivery: float = 60e-6
    """Seconds from the end of sending a plan to its arrival, within one machine."""
    decode: float = 40e-6
    """Seconds to deserialize a plan on the receiving rank."""
    lead: float = 60e-6
    """Seconds between two steps of a stage."""
    prepare_sequence: float = 3e-6
    """Seconds to build a step's inputs, per sequence after the first; ``HostCosts.fixed`` includes the first one."""
    send: float = 200e-6
    """Seconds that a rank takes to start sending activations or tokens; counts only if there are several stages."""

    def plan_seconds(self, num_sequences: float, num_started: int = 0) -> float:
        """Seconds that rank 0 schedules before it can send a plan of ``num_sequences`` sequences.

        Args:
            num_started: tokens of new prompts in the plan.
        """
        return self.schedule + self.schedule_sequence * num_sequences + self.schedule_token * num_started

    @property
    def arrival_seconds(self) -> float:
        """Seconds from when a rank has sent a plan until the receiving rank has deserialized it, within one machine."""
        return self.delivery + self.decode

    def prepare_seconds(self, num_sequences: float) -> float:
        """Seconds to build the inputs of ``num_sequences`` sequences, less those of one sequence."""
        return self.prepare_sequence * max(0, num_sequences - 1)


def count_started(plan: BatchPlan) -> int:
    """Tokens of the new prompts in a plan."""
    return sum(len(start.token_ids) for start in plan.starts)


def plan_bytes(plan: BatchPlan) -> int:
    """Approximate serialized bytes of a plan."""
    return PLAN_BYTES + ENTRY_BYTES * len(plan.entries) + TOKEN_BYTES * count_started(plan)
