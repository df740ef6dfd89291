"""The kinds of parts that are chosen by name, where the contract of each is written, and what ships of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of parts.

    Args:
        contract: ``module:attribute`` of the class or type whose docstring says what a part must do.
        shipped: the parts that come with LABInfer: ``module:attribute`` by name.
        is_class: whether a part is a subclass of the contract; else it is any callable.
        details: names that ``register`` takes beside kind and name.
        in_gateway: whether the gateway process uses parts of this kind, too. A plugin that adds such a part is also imported there, and
            must not import torch when it is imported.
    """

    contract: str
    shipped: Mapping[str, str]
    is_class: bool = False
    details: tuple[str, ...] = ()
    in_gateway: bool = False


KINDS: dict[str, Kind] = {
    "scheduling_policy": Kind(
        contract="labinfer.engine.policies:SchedulingPolicy",
        shipped={name: f"labinfer.engine.policies:{name}" for name in ("fcfs", "priority", "fair")},
    ),
    "batch_policy": Kind(
        contract="labinfer.engine.policies:BatchPolicy",
        shipped={name: f"labinfer.engine.policies:{name}" for name in ("balanced", "throttle", "greedy", "phases")},
    ),
    "pipeline_schedule": Kind(
        contract="labinfer.engine.pipeline_schedule:PipelineSchedule",
        is_class=True,
        shipped={
            "1f1b": "labinfer.engine.pipeline_schedule:OneForwardOneBack",
            "gpipe": "labinfer.engine.pipeline_schedule:GPipe",
            "lockstep": "labinfer.engine.pipeline_schedule:Lockstep",
        },
    ),
}
"""Kinds by name."""
