"""PlanSends: who sends a plan to the ranks of each stage, and how many sends that takes."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.spmd.command_tree import CommandTree
from labinfer.spmd.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PlanSends:
    """Sends of a plan, stage by stage. Those to a stage count all that the sender does before and for the last of its ranks."""

    broadcast: int
    """Those of rank 0."""
    direct: list[int]
    """Those of rank 0 to each stage; 0 where others send to all its ranks."""
    forwards: list[list[tuple[int, int]]]
    """Stages whose ranks send to each stage, ascending, and the sends of such a rank."""
    forwarded: list[int]
    """Those of a rank of each stage, at most; rank 0 does not count."""

    @classmethod
    def from_topology(cls, topology: Topology) -> PlanSends:
        """The sends of a ``CommandTree`` over the ranks of a layout."""
        tree, num_stages = CommandTree(topology.command_order), topology.num_stages
        stages = {rank: stage for stage in range(num_stages) for rank in topology.stage_ranks(stage)}
        direct, forwarded = [0] * num_stages, [0] * num_stages
        forwards: list[dict[int, int]] = [{} for _ in range(num_stages)]
        for receiver, stage in stages.items():
            sender = tree.sender(receiver)
            count = tree.receivers(sender).index(receiver) + 1 if receiver else 0
            if sender == 0:
                direct[stage] = max(direct[stage], count)
            else:
                by_sender = forwards[stage]
                by_sender[stages[sender]] = max(by_sender.get(stages[sender], 0), count)
                forwarded[stages[sender]] = max(forwarded[stages[sender]], count)
        return cls(
            broadcast=len(tree.receivers(0)),
            direct=direct,
            forwards=[sorted(by_sender.items()) for by_sender in forwards],
            forwarded=forwarded,
        )
