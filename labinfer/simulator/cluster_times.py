"""ClusterTimes: the times of micro-batches by the costs of hosts and the links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labinfer.plan import BatchPlan
from labinfer.planner.cluster import Cluster
from labinfer.planner.costs import HostCosts
from labinfer.planner.step_shape import StepShape
from labinfer.rank_stats import StepTimes
from labinfer.simulator.overheads import Overheads, plan_bytes
from labinfer.simulator.plan_sends import PlanSends
from labinfer.simulator.plan_times import Forward, Hop, PlanTimes, StageTimes
from labinfer.spmd.topology import Topology

MEASURED_SIZES = (1, 8, 64)
"""Decoding sequences of the steps that a start times; see ``executor/measure.py``."""


@dataclass(frozen=True)
class Stage:
    """A stage of the layout on its machine."""

    machine: str
    costs: HostCosts
    layers: Mapping[str, int]
    """Number of layers of each kind."""


class ClusterTimes:
    """Times by costs; see ``TimeSource``.

    ``HostCosts.fixed`` counts as the part of a step that needs no activations, so that a stage that waits does it meanwhile.
    Plans go from rank 0 and those that forward them to one rank after another. Activations go to each tensor-parallel rank of the
    next stage over the same link.

    Args:
        stages: of the topology, in order.
        overheads: seconds outside the model.
    """

    def __init__(
        self, topology: Topology, stages: Sequence[Stage], cluster: Cluster, overheads: Overheads | None = None
    ):
        self._topology, self._stages, self._overheads = topology, stages, overheads or Overheads()
        num_stages = topology.num_stages
        own = topology.place(0).stage
        self._sends = sends = PlanSends.from_topology(topology)
        own_machine = stages[own].machine
        self._control = [cluster.link(own_machine, stage.machine) for stage in stages]
        self._forwards = [
            [(sender, num_sends, cluster.link(stages[sender].machine, stage.machine)) for sender, num_sends in counts]
            for stage, counts in zip(stages, sends.forwards, strict=True)
        ]
        nexts = [*range(1, num_stages), own]
        self._links = [cluster.link(stages[i].machine, stages[j].machine) for i, j in enumerate(nexts)]
        self._copies = [topology.tp_sizes[j] for j in nexts[:-1]]
        self._kinds = [self._kind(stage) for stage in range(num_stages)]

    def times(self, plan: BatchPlan) -> PlanTimes:
        own, shape, num_stages = self._overheads, StepShape.from_plan(plan), self._topology.num_stages
        by_kind: dict[tuple, StageTimes] = {}
        for kind in self._kinds:
            if kind not in by_kind:
                by_kind[kind] = self._stage_times(kind, shape, len(plan.entries))
        rows, size = shape.rows, plan_bytes(plan)
        hops = [
            Hop(rows * stage.costs.hidden_bytes * copies / link.bytes_per_second, link.latency)
            for stage, copies, link in zip(self._stages, self._copies, self._links, strict=False)
        ]
        hops.append(Hop(plan.result_bytes / self._links[-1].bytes_per_second, self._links[-1].latency))
        return PlanTimes(
            schedule=own.schedule_seconds(plan),
            broadcast=own.broadcast + own.send_plan * self._sends.broadcast if self._sends.broadcast else 0.0,
            deliveries=[
                own.broadcast + own.send_plan * num_sends + own.delivery + link.seconds(size) if num_sends else 0.0
                for num_sends, link in zip(self._sends.direct, self._control, strict=True)
            ],
            stages=[by_kind[self._kinds[stage]] for stage in range(num_stages)],
            forwards=[
                [
                    Forward(sender, own.send_plan * num_sends + own.delivery + link.seconds(size))
                    for sender, num_sends, link in forwards
                ]
                for forwards in self._forwards
            ],
            hops=hops,
        )

    def step_times(self, max_num_seqs: int) -> StepTimes:
        """The times that a start of this layout would measure."""
        sizes = [size for size in MEASURED_SIZES if size <= max_num_seqs]
        shapes = [StepShape(num_decodes=size, decode_context=size, num_samples=size) for size in sizes]
        by_stage = [
            [sum(self._stage_times(kind, shape, size)[:3]) for size, shape in zip(sizes, shapes, strict=True)]
            for kind in self._kinds
        ]
        one_row = [
            link.seconds(stage.costs.hidden_bytes) for stage, link in zip(self._stages, self._links, strict=True)
        ]
        return StepTimes(sizes=sizes, by_stage=by_stage, hop=sum(one_row) / len(one_row) if len(one_row) > 1 else 0.0)

    def _kind(self, stage: int) -> tuple:
        """Equal for stages of equal times; costs are compared by identity, as they are large."""
        part, topology = self._stages[stage], self._topology
        first = next(i for i, other in enumerate(self._stages) if other.costs is part.costs)
        ends = topology.is_first(stage), topology.is_last(stage)
        return first, tuple(part.layers.items()), *ends, self._sends.forwarded[stage]

    def _stage_times(self, kind: tuple, shape: StepShape, num_sequences: int) -> StageTimes:
        first, layers, is_first, is_last, num_forwarded = kind
        costs = self._stages[first].costs
        seconds = costs.step_seconds(shape, dict(layers), is_first=is_first, is_last=False)
        sample = costs.head.at(shape.num_samples) if is_last and shape.num_samples else 0.0
        own = self._overheads
        return StageTimes(
            prepare=costs.fixed + own.prepare + own.prepare_sequence * num_sequences,
            run=seconds - costs.fixed,
            sample=sample,
            send=own.send if self._topology.num_stages > 1 else 0.0,
            lead=own.lead + own.send_plan * num_forwarded,
        )
