"""ClusterTimes: times of micro-batches from the costs of hosts and the links between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from labinfer.base.plan import BatchPlan
from labinfer.base.rank_stats import StepTimes
from labinfer.comm.spmd.topology import Topology
from labinfer.planner.cluster import Cluster
from labinfer.planner.objective import Stage
from labinfer.planner.overheads import count_started, plan_bytes
from labinfer.planner.simulator.plan_sends import PlanSends
from labinfer.planner.simulator.plan_times import Forward, Hop, PlanTimes, StageTimes
from labinfer.planner.step_shape import StepShape

MEASURED_SIZES = (1, 8, 64)
"""Batch sizes (decoding sequences) of the steps timed at startup; see ``launch/measure/startup_profiler.py``."""


class ClusterTimes:
    """Times computed from costs; see ``TimeSource``.

    ``HostCosts.fixed`` counts as time to prepare a step, for which a stage does not wait for activations. Rank 0 and the forwarding
    ranks send a plan to one rank after another. Activations go to all tensor-parallel ranks of the next stage over one link.

    Args:
        stages: stages of ``topology``, in order.
    """

    def __init__(self, topology: Topology, stages: Sequence[Stage], cluster: Cluster):
        self._topology, self._stages = topology, stages
        self._sends = sends = PlanSends.from_topology(topology)
        rank0 = stages[topology.place(0).stage]
        self._scheduling = rank0.costs.overheads
        self._control = [cluster.link(rank0.machine, stage.machine) for stage in stages]
        self._forwards = [
            [(sender, num_sends, cluster.link(stages[sender].machine, stage.machine)) for sender, num_sends in counts]
            for stage, counts in zip(stages, sends.forwards, strict=True)
        ]
        self._links = [cluster.link(a.machine, b.machine) for a, b in itertools.pairwise((*stages, rank0))]
        self._kinds = [self._kind(stage) for stage in range(topology.num_stages)]

    def times(self, plan: BatchPlan) -> PlanTimes:
        shape, size, overheads = StepShape.from_plan(plan), plan_bytes(plan), self._scheduling
        by_kind: dict[tuple, StageTimes] = {}
        for stage, kind in enumerate(self._kinds):
            if kind not in by_kind:
                by_kind[kind] = self._stage_times(stage, shape, len(plan.entries))
        hops = [
            Hop(sender.costs.sent_bytes(shape.rows, receiver.costs) / link.bytes_per_second, link.latency)
            for (sender, receiver), link in zip(itertools.pairwise(self._stages), self._links, strict=False)
        ]
        hops.append(Hop(plan.result_bytes / self._links[-1].bytes_per_second, self._links[-1].latency))
        num_sends = self._sends.broadcast
        return PlanTimes(
            schedule=overheads.plan_seconds(len(plan.entries), count_started(plan)),
            broadcast=overheads.broadcast + overheads.send_plan * num_sends if num_sends else 0.0,
            deliveries=[
                overheads.broadcast
                + overheads.send_plan * num_sends
                + stage.costs.overheads.arrival_seconds
                + link.seconds(size)
                if num_sends
                else 0.0
                for stage, num_sends, link in zip(self._stages, self._sends.direct, self._control, strict=True)
            ],
            stages=[by_kind[kind] for kind in self._kinds],
            forwards=[
                [
                    Forward(
                        sender,
                        self._stages[sender].costs.overheads.send_plan * num_sends
                        + stage.costs.overheads.arrival_seconds
                        + link.seconds(size),
                    )
                    for sender, num_sends, link in forwards
                ]
                for stage, forwards in zip(self._stages, self._forwards, strict=True)
            ],
            hops=hops,
        )

    def step_times(self, max_num_seqs: int) -> StepTimes:
        """Step times that a launch of this layout would measure at startup."""
        sizes = [size for size in MEASURED_SIZES if size <= max_num_seqs]
        shapes = [StepShape(num_decodes=size, decode_context=size, num_samples=size) for size in sizes]
        by_stage = [
            [sum(self._stage_times(stage, shape, size)[:3]) for size, shape in zip(sizes, shapes, strict=True)]
            for stage in range(self._topology.num_stages)
        ]
        one_row = [
            link.seconds(sender.costs.sent_bytes(1, receiver.costs))
            for (sender, receiver), link in zip(itertools.pairwise(self._stages), self._links, strict=False)
        ]
        one_row.append(self._links[-1].latency)
        return StepTimes(sizes=sizes, by_stage=by_stage, hop=sum(one_row) / len(one_row) if len(one_row) > 1 else 0.0)

    def _kind(self, stage: int) -> tuple:
        """Key that is equal for stages with equal times. It has the ``id`` of the costs, which are too large to compare."""
        part, topology = self._stages[stage], self._topology
        first = next(number for number, other in enumerate(self._stages) if other.costs is part.costs)
        ends = topology.is_first(stage), topology.is_last(stage)
        return first, tuple(part.layers.items()), *ends, self._sends.forwarded[stage]

    def _stage_times(self, stage: int, shape: StepShape, num_sequences: int) -> StageTimes:
        part, topology = self._stages[stage], self._topology
        costs, is_last = part.costs, topology.is_last(stage)
        seconds = costs.step_seconds(shape, part.layers, is_first=topology.is_first(stage), is_last=is_last)
        sample = costs.head_seconds(shape) if is_last else 0.0
        return StageTimes(
            prepare=costs.fixed + costs.overheads.prepare_seconds(num_sequences),
            run=seconds - costs.fixed - sample,
            sample=sample,
            send=costs.overheads.send if topology.num_stages > 1 else 0.0,
            lead=costs.overheads.lead + costs.overheads.send_plan * self._sends.forwarded[stage],
        )
