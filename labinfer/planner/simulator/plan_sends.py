"""PlanSends: who sends a plan to the ranks of each stage, and how many sends that takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from labinfer.comm.spmd.command_senders import command_senders
from labinfer.comm.spmd.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PlanSends:
    """Sends of a plan, stage by stage. Those to a stage count all that the sender does before and for the last of its ranks."""

    broadcast: int
    """Sends of rank 0."""
    direct: list[int]
    """Sends of rank 0 to each stage; 0 where others send to all its ranks."""
    forwards: list[list[tuple[int, int]]]
    """Stages whose ranks send to each stage, ascending, and the sends of such a rank."""
    forwarded: list[int]
    """Sends of a rank of each stage, at most; rank 0 does not count."""

    @classmethod
    def from_topology(cls, topology: Topology) -> PlanSends:
        """The sends of a layout's ranks."""
        stages = {rank: stage for stage in range(topology.num_stages) for rank in topology.stage_ranks(stage)}
        direct, forwarded = [0] * topology.num_stages, [0] * topology.num_stages
        forwards: list[dict[int, int]] = [{} for _ in direct]
        counts: Counter[int] = Counter()
        for receiver, sender in command_senders(topology.command_order).items():
            counts[sender] += 1
            stage, sender_stage = stages[receiver], stages[sender]
            if sender == 0:
                direct[stage] = counts[sender]
            else:
                forwards[stage][sender_stage] = max(counts[sender], forwards[stage].get(sender_stage, 0))
                forwarded[sender_stage] = max(counts[sender], forwarded[sender_stage])
        return cls(
            broadcast=counts[0],
            direct=direct,
            forwards=[sorted(by_stage.items()) for by_stage in forwards],
            forwarded=forwarded,
        )
