"""Simulation: engine spec, topology and times of a run on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from labinfer.base.config import CacheOptions, EngineOptions, SchedulerOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.topology import Topology, make_topology, per_stage
from labinfer.engine.spec import EngineSpec
from labinfer.observe.output_file import OutputFile
from labinfer.observe.table import format_bytes
from labinfer.observe.trace import Track, read_trace
from labinfer.planner.cluster import Cluster, Machine
from labinfer.planner.costs import HostCosts
from labinfer.planner.objective import EngineLimits, Stage, kv_blocks, stage_rooms, window_needs
from labinfer.planner.saved_plan import rounding
from labinfer.planner.simulator.cluster_times import ClusterTimes
from labinfer.planner.simulator.model import SimulatedModel
from labinfer.planner.simulator.plan_times import TimeSource
from labinfer.planner.simulator.recorded_times import RecordedTimes

VOCAB_SIZE = 1 << 31
"""Vocabulary size of a simulated model, large, as cost files do not tell the real size."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Inputs of a simulated engine, except the requests."""

    spec: EngineSpec
    topology: Topology
    source: TimeSource
    hosts: tuple[str, ...] = ()
    """Machine name of each stage; empty if unknown."""
    is_measured: bool = True
    """Whether all times were measured rather than estimated."""
    recorded: tuple[Track, ...] = ()
    """Tracks of the recorded run in a replay."""

    def make_model(
        self,
        cache: CacheOptions,
        scheduling: SchedulerOptions,
        *,
        trace: OutputFile | None = None,
        num_slices: int = 0,
    ) -> SimulatedModel:
        """A new simulated model at time 0; for the arguments see ``SimulatedModel``."""
        return SimulatedModel(
            self.spec,
            self.topology,
            self.source,
            cache=cache,
            scheduling=scheduling,
            trace=trace,
            num_slices=num_slices,
        )


def replay_simulation(path: str) -> Simulation:
    """A simulation of the run whose trace is in the file ``path``.

    Raises:
        UserError: the file is no trace, or lacks the engine's spec or steps of all stages.
    """
    tracks, fields = read_trace(path)
    try:
        spec = msgspec.convert(fields, EngineSpec)
    except msgspec.ValidationError as error:
        raise UserError(f"{path} lacks the engine's spec ({error}); record it again with --trace") from None
    places = sorted(tracks, key=lambda track: (track.stage, track.tp_rank))
    tp_sizes = tuple(sum(track.stage == stage for track in tracks) for stage in range(spec.num_stages))
    layers = tuple(
        (stage, stage + 1) for stage in range(spec.num_stages)
    )  # placeholders: a trace does not record the layers
    if sum(tp_sizes) != len(tracks) or not all(tp_sizes):
        raise UserError(f"{path} has tracks of {len(tracks)} ranks, which do not match {spec.num_stages} stages")
    try:
        source = RecordedTimes(tracks)
    except UserError as error:
        raise UserError(f"{path} cannot be replayed: {error}") from None
    return Simulation(
        spec=spec,
        topology=Topology(tp_sizes, layers, tuple(track.rank for track in places)),
        source=source,
        recorded=tuple(tracks),
    )


def cluster_simulation(cluster: Cluster, options: EngineOptions) -> Simulation:
    """A simulation of a layout on a cluster. Ranks are numbered machine by machine.

    Args:
        options: the layout (``-tp``, ``-pp``, ``--layers``, ``--ranks``, ``--dtype``, ``--quantization``) and the cache options.

    Raises:
        UserError: the layout does not match the cluster, or a stage's part of the model does not fit.
    """
    parallel, scheduler, size = options.parallel, options.scheduler, options.cache.tokens_per_block
    nodes = [machine.name for machine in cluster.machines for _ in range(machine.ranks)]
    topology = make_topology(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.layers,
        len(cluster.machines[0].costs[0].layers),
        len(nodes),
        ranks=parallel.ranks,
        last_cut=cluster.machines[0].costs[0].last_cut,
        remedy="probe machines with {ranks} in total",
    )
    topology.check_nodes(nodes)
    machines = {machine.name: machine for machine in cluster.machines}
    dtypes = per_stage("--dtype", options.model.dtype, topology.num_stages)
    quantizations = per_stage("--quantization", options.model.quantization, topology.num_stages)
    stages = []
    for stage, tp_size in enumerate(topology.tp_sizes):
        machine = machines[nodes[topology.stage_ranks(stage)[0]]]
        costs = _choose_costs(machine, tp_size, dtypes[stage], quantizations[stage])
        begin, end = topology.layers[stage]
        stages.append(Stage(machine=machine.name, costs=costs, begin=begin, end=end))
    limits = EngineLimits(
        max_model_len=options.model.max_model_len
        or scheduler.max_num_seqs * max(stage.costs.memory for stage in stages),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        chunked_prefill_size=scheduler.chunked_prefill_size,
        block_size=size,
        memory_utilization=options.cache.memory_utilization,
        kept=scheduler.keep if scheduler.context_shift else None,
        num_kv_blocks=options.cache.num_kv_blocks,
    )
    blocks = kv_blocks(stages, limits)
    num_blocks = blocks.num_blocks
    all_states = [room.num_states(limits.max_num_seqs) for room in stage_rooms(stages, limits)]
    num_states = min(all_states)
    if num_blocks * size < 2 or num_states < 1:
        of_stage = [min(count * size, states) for count, states in zip(blocks.of_rank, all_states, strict=True)]
        raise _describe_shortfall(topology, stages, of_stage)
    keeps_state = any(stage.costs.state_bytes.get(kind) for stage in stages for kind in stage.layers)
    source = ClusterTimes(topology, stages, cluster)
    fits = num_blocks * size
    spec = EngineSpec(
        num_stages=topology.num_stages,
        num_blocks=num_blocks,
        window=window_needs(stages[0].costs, limits).window if blocks.num_window_blocks else 0,
        num_window_blocks=blocks.num_window_blocks,
        num_states=num_states if keeps_state else 0,
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        max_model_len=min(fits, options.model.max_model_len or fits),
        step_times=source.step_times(scheduler.max_num_seqs) if topology.num_stages > 1 else None,
    )
    return Simulation(
        spec=spec,
        topology=topology,
        source=source,
        hosts=tuple(stage.machine for stage in stages),
        is_measured=all(stage.costs.measured for stage in stages),
    )


def _choose_costs(machine: Machine, tp_size: int, dtype: str, quantization: str) -> HostCosts:
    """The first costs of ``machine`` for ``tp_size``, ``dtype`` and ``quantization``.

    Raises:
        UserError: the machine has no such costs.
    """
    for costs in machine.costs:
        if (
            costs.tp_size == tp_size
            and dtype in ("auto", costs.dtype)
            and quantization in ("auto", rounding(costs.quantization))
        ):
            return costs
    form = f"-tp {tp_size}" + f" --dtype {dtype}" * (dtype != "auto")
    form += f" --quantization {quantization}" * (quantization != "auto")
    known = ", ".join(f"tp {costs.tp_size} in {costs.dtype} and {costs.quantization}" for costs in machine.costs)
    raise UserError(f"machine {machine.name} has no costs for {form}, only for {known}")


def _describe_shortfall(topology: Topology, stages: Sequence[Stage], rooms: Sequence[int]) -> UserError:
    number = rooms.index(min(rooms))
    begin, end = topology.layers[number]
    return UserError(
        f"stage {number} on {stages[number].machine} has too little memory for layers {begin} to {end - 1} and a "
        f"KV cache: {format_bytes(stages[number].costs.memory)}; use more stages, --layers with fewer there, or a "
        "smaller --dtype"
    )
