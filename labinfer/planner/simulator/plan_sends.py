"""PlanSends: which ranks send a plan to the ranks of each stage, and in how many sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from labinfer.comm.spmd.command_senders import command_senders
from labinfer.comm.spmd.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PlanSends:
    """Number of sends of a plan, by stage. A sender sends to one rank after another; the number for a stage counts its sends up to
    the last rank of that stage."""

    broadcast: int
    """Number of sends of a plan by rank 0, to ranks of any stage."""
    direct: list[int]
    """Number of sends of rank 0 up to the last rank that it serves in each stage; 0 if other ranks send to the whole
    stage."""
    forwards: list[list[tuple[int, int]]]
    """For each receiving stage: pairs (stage whose ranks forward the plan to it, number of sends by a rank of that stage),
    ascending."""
    forwarded: list[int]
    """Maximum number of sends by a rank of each stage, rank 0 excluded."""

    @classmethod
    def from_topology(cls, topology: Topology) -> PlanSends:
        """The sends of a plan among the ranks of ``topology``."""
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
