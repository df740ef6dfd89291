"""Simulations whose times are given: plans without a scheduler, and engines with equal steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from labinfer.base.config import CacheOptions, SchedulerOptions
from labinfer.base.plan import BatchEntry, BatchPlan
from labinfer.comm.spmd.topology import Topology
from labinfer.engine.spec import EngineSpec
from labinfer.observe.output_file import OutputFile
from labinfer.planner.cluster import Cluster, Machine, NetworkLink
from labinfer.planner.costs import HostCosts, LayerCosts, Points
from labinfer.planner.simulator.model import SimulatedModel
from labinfer.planner.simulator.plan_times import Hop, PlanTimes, StageTimes


@dataclass
class GivenTimes:
    """A source that asks a function."""

    of_plan: Callable[[BatchPlan], PlanTimes]

    def times(self, plan: BatchPlan) -> PlanTimes:
        return self.of_plan(plan)


def equal_steps(*seconds: float, hop: float = 0.0) -> GivenTimes:
    """Steps that take so long in each stage, whatever is in them; nothing else takes time but hops, the tokens' way included."""
    stages = [StageTimes(prepare=0.0, run=run) for run in seconds]
    times = PlanTimes(
        schedule=0.0,
        broadcast=0.0,
        deliveries=[0.0] * len(stages),
        stages=stages,
        hops=[Hop(0.0, hop) for _ in stages],
    )
    return GivenTimes(lambda plan: times)


def topology(num_stages: int, tp_sizes: Sequence[int] = (), ranks: tuple[int, ...] = ()) -> Topology:
    """A layer for each stage."""
    layers = tuple((stage, stage + 1) for stage in range(num_stages))
    return Topology(tuple(tp_sizes) or (1,) * num_stages, layers, ranks)


def make_plan(step_id: int, num_samples: int = 1) -> BatchPlan:
    """A plan of one sequence with a token."""
    entry = BatchEntry(
        seq_id=step_id + 10,
        num_tokens=1,
        begin=0,
        position=0,
        first_block=0,
        new_blocks=[],
        num_samples=num_samples,
        is_decode=True,
    )
    return BatchPlan(step_id=step_id, starts=[], finished=[], moves=[], entries=[entry])


def make_model(
    source: GivenTimes,
    num_stages: int,
    *,
    ranks: tuple[int, ...] = (),
    num_slices: int = 0,
    trace: OutputFile | None = None,
    num_blocks: int = 1000,
    **scheduling,
) -> SimulatedModel:
    spec = EngineSpec(
        num_stages=num_stages, num_blocks=num_blocks, vocab_size=1000, hidden_size=4, max_model_len=10_000
    )
    return SimulatedModel(
        spec,
        topology(num_stages, ranks=ranks),
        source,
        cache=CacheOptions(),
        scheduling=SchedulerOptions(**scheduling),
        trace=trace,
        num_slices=num_slices,
    )


def make_costs(speed: float = 1.0, num_layers: int = 8, **fields) -> HostCosts:
    """Costs of a host: ms for a layer's matrices from 8 rows on 1 + rows / 64, for a step 0.5, for a sampled row 0.1, all over
    the speed."""

    def scaled(*numbers: float) -> list[float]:
        return [number / speed for number in numbers]

    layer = LayerCosts(
        linear=Points([1, 8, 9, 512], scaled(1e-3, 1e-3, 1e-3 + 9e-3 / 64, 9e-3)),
        small=Points([1], scaled(1e-5)),
        decode=tuple(scaled(1e-5, 1e-5, 1e-8)),
        chunk=tuple(scaled(1e-5, 1e-6, 1e-9)),
    )
    costs = HostCosts(
        name="node",
        model="m",
        dtype="float32",
        memory=1 << 30,
        layers=["dense"] * num_layers,
        layer_kinds={"dense": layer},
        layer_bytes={"dense": 1 << 20},
        kv_bytes={"dense": 1024},
        hidden_bytes=2048,
        embedding_bytes=1 << 20,
        head_bytes=1 << 20,
        head=Points([0, 64], scaled(0.0, 6.4e-3)),
        embed=Points([1], scaled(1e-5)),
        fixed=5e-4 / speed,
    )
    return msgspec.structs.replace(costs, **fields)


def make_cluster(*machines: Machine, link: NetworkLink | None = None) -> Cluster:
    return Cluster(machines=list(machines), default_link=link or NetworkLink(1e-3, 1e8)).expand()
