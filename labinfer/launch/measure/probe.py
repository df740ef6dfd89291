"""Costs of hosts: seconds of a model's layers, head and steps, measured with the model runner that serves.

Loads a few layers of the model, with embedding and LM head, and runs dummy steps through them. Their weights exceed the CPU
caches, since a stage reads its weights from memory.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plan import Command
from labinfer.base.rank_stats import WorkerStats
from labinfer.comm.control import ControlChannel
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.links import measure_links
from labinfer.comm.spmd.devices import DeviceName, machine_names, num_sharing, torch_device, use_device
from labinfer.comm.spmd.machine import return_freed_memory
from labinfer.comm.tensor_parallel import TensorParallelCommunicator
from labinfer.launch.build import build_placed
from labinfer.launch.cgroup_limits import cpu_share, describe_hardware, memory_share
from labinfer.launch.communicators import Communicators
from labinfer.launch.draft_model import plan_draft_model
from labinfer.launch.find_model import find_model
from labinfer.launch.layout.draft_layout import draft_options
from labinfer.launch.layout.kv_capacity import swap_bytes
from labinfer.launch.layout.layout import Layout
from labinfer.launch.measure.cost_file import file_name, read_costs, write_costs
from labinfer.launch.measure.layer_fit import (
    CONTEXTS,
    DECODE_ROWS,
)
from labinfer.launch.measure.layer_profiler import LayerProfiler
from labinfer.launch.measure.probe_layout import (
    Units,
    all_degrees,
    make_unit_layout,
    probed_devices,
    ranks_by_machine,
    split_machines,
)
from labinfer.launch.measure.quota_timer import QuotaTimer
from labinfer.launch.measure.unit_costs import measure_costs
from labinfer.launch.providers import collectives_backend, describe_device
from labinfer.launch.tune import cache_folder, prepare_providers
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.layers.segments import SegmentSum
from labinfer.models.layers.sharding import shard_columns
from labinfer.native.cache_file import digest
from labinfer.planner.cluster import Cluster, Machine, MachinePairLink, NetworkLink, check_link
from labinfer.planner.costs import DraftBytes, HostCosts
from labinfer.planner.merge_costs import merge_ranks
from labinfer.worker.step_graphs import CAPTURED_BYTES, find_capture

logger = logging.getLogger(__name__)

CACHE_FRACTION = 0.25
"""Maximum fraction of the free memory for the KV cache of a probe."""
STARTED_BYTES = 16 << 20
"""Memory that a CPU rank uses at startup besides weights, before KV blocks are counted: modules, buffers, page tables,
and fragments of freed memory."""
MAX_MEASUREMENTS = 4
"""Maximum number of repeated measurements while a disturbed machine gives impossible times."""


def probe_cluster(
    group: RankGroup,
    options: EngineOptions,
    on_progress: Callable[[str], None] = lambda text: None,
    *,
    for_plan: bool = False,
) -> Cluster:
    """Measure the costs of every machine of the group, and the links between them; collective. All machines measure at once, as in a run.

    Args:
        group: rank group without a model: the probe ends split-off communicators.
        on_progress: called with a text that names the current measurement.
        for_plan: whether to measure all tensor-parallel degrees that the machines support, not only that of the options. Links are
            then cached, too.

    Raises:
        CollectiveError: the model, the devices or the memory are unsuitable on any rank.
    """
    directory, config = find_model(group, options)
    mtp = config.mtp
    config = dataclasses.replace(config, mtp=None)  # excludes drafting from the measured seconds
    with group.raise_on_all_ranks():
        devices = probed_devices(options, group.everyone)
        names = machine_names(devices, group.everyone)
        rounds = all_degrees(names, config, options) if for_plan else [split_machines(names, options)]
        own_units = [next(unit for unit in units if group.rank in unit) for units in rounds]
        layouts = [make_unit_layout(options, config, group.everyone, unit, devices) for unit in own_units]
        drafting = [_draft_bytes(group, options, layout, mtp) for layout in layouts]
        device = use_device(devices[group.rank])
    providers = prepare_providers(group, device, reproducible=options.model.reproducible)
    folder, begin, is_known, own = cache_folder(), time.perf_counter(), True, []
    is_anew = options.model.autotune == "again"
    with group.raise_on_all_ranks():
        taken = STARTED_BYTES + swap_bytes(group, options, layouts[0], 0) if device.type == "cpu" else 0
        free = max(0, memory_share(group, devices) - taken)
    for units, layout, draft in zip(rounds, layouts, drafting, strict=True):
        captured = CAPTURED_BYTES * (find_capture(providers, layout.topology.tp_sizes[0]) is not None)
        path = folder / file_name(group, options, layout, config, providers) if folder is not None else None
        costs = None if is_anew else read_costs(path, HostCosts, HostCosts.check_measured)
        if not all(group.comm.all_gather_bytes(b"" if costs is None else b"known")):
            on_progress("loading some layers" + f", tp {layout.topology.tp_sizes[0]}" * (len(rounds) > 1))
            timer = _make_timer(group, options, layout, directory, units, devices=devices)
            group.comm.barrier()
            (costs, is_possible), is_known = _measure_until_possible(group, timer, layout, config, on_progress), False
            del timer  # frees the loaded layers
            return_freed_memory()
            write_costs(path if is_possible else None, costs)
            group.comm.barrier()  # ranks of a unit may still be in their last all-reduce
            group.end_splits()
        own.append(
            msgspec.structs.replace(
                costs,
                name=names[group.rank],
                hardware=describe_hardware(group, device),
                memory=max(0, free - captured),
                drafting=msgspec.structs.replace(draft, first=draft.first + captured * (draft.first > 0)),
                sharing=num_sharing(group.rank, devices, group.everyone) if device.type == "cpu" else 1,
            )
        )
    gathered = {
        rank: msgspec.json.decode(data, type=list[HostCosts])
        for rank, data in group.gather_bytes(msgspec.json.encode(own)).items()
    }
    machines = []
    for name, ranks in ranks_by_machine(names).items():
        merged = [merge_ranks(measured) for measured in zip(*(gathered[rank] for rank in ranks), strict=True)]
        costs_by_degree = {costs.tp_size: costs for costs in merged}
        block_size = max(describe_device(devices[rank].type).block_size for rank in ranks)
        machines.append(
            Machine(name=name, costs=list(costs_by_degree.values()), num_ranks=len(ranks), block_size=block_size)
        )
    on_progress("links")
    links = _find_links(group, names, folder, may_remember=is_known and for_plan)
    if group.rank == 0:
        how = f"measured in {time.perf_counter() - begin:.1f} s"
        if is_known:
            how = "cached; --autotune again measures again"
        logger.info("costs of %d machine%s: %s", len(machines), "s" * (len(machines) > 1), how)
    return Cluster(machines=machines, links=links)


def _draft_bytes(group: RankGroup, options: EngineOptions, layout: Layout, mtp: LayerConfig | None) -> DraftBytes:
    """Bytes of an MTP layer on this rank, and of a draft model on rank 0.

    Args:
        layout: layout of the model without its MTP layer, on the ranks that measure together with this rank.
        mtp: config of the MTP layer; None without one.

    Raises:
        UserError: the draft model is not found, or cannot draft for this model.
    """
    numbers: dict[str, int] = {}
    if mtp is not None:
        config = dataclasses.replace(layout.config, mtp=mtp)
        meta = dataclasses.replace(layout, config=config, _meta={}).meta(layout.topology.place(group.rank))
        numbers = {"last": meta.mtp_bytes, "last_kv": meta.mtp_bytes_per_token}
    speculation = options.scheduler.speculative_config
    if speculation is not None and speculation.model and group.rank == 0:
        own = draft_options(options, speculation.model, layout)
        draft = plan_draft_model(own, group.environment, layout, group.everyone)[1]
        place = draft.topology.place(0)
        meta = draft.meta(place)
        numbers |= {
            "first": draft.weight_bytes(place),
            "first_kv": meta.bytes_per_token,
            "first_state": meta.bytes_per_sequence,
        }
    return DraftBytes(**numbers)


def _find_links(
    group: RankGroup, machines: Sequence[str], folder: Path | None, *, may_remember: bool
) -> list[MachinePairLink]:
    """Links between all machines, measured or read from rank 0's cache file; collective.

    Args:
        machines: name of each rank's machine.
        folder: folder of the cache file; None disables the cache.
        may_remember: whether cached links of an earlier start may be used.
    """
    by_machine = ranks_by_machine(machines)
    names, path = list(by_machine), None
    if folder is not None:
        path = folder / f"links-{digest(labinfer.__version__, group.comm.name, names)}.json"
    data = b""
    if (
        may_remember
        and group.rank == 0
        and (links := read_costs(path, list[MachinePairLink], _check_links)) is not None
    ):
        data = msgspec.msgpack.encode(links)
    if data := group.comm.all_gather_bytes(data)[0]:
        return msgspec.msgpack.decode(data, type=list[MachinePairLink])
    times = measure_links(group.comm, [ranks[0] for ranks in by_machine.values()])
    links = [
        MachinePairLink(a=names[a], b=names[b], link=NetworkLink(each.latency, each.bytes_per_second))
        for (a, b), each in times.items()
    ]
    if group.rank == 0:
        write_costs(path, links)
    return links


def _check_links(links: Sequence[MachinePairLink]) -> None:
    """Check the links between machines.

    Raises:
        UserError: a link has impossible values.
    """
    for pair in links:
        check_link(pair.link, f"{pair.a}:{pair.b}")


def _make_timer(
    group: RankGroup,
    options: EngineOptions,
    layout: Layout,
    directory: Path,
    units: Units,
    *,
    devices: Mapping[int, DeviceName],
) -> LayerProfiler:
    """Load the layers on the ranks of each unit, and return their profiler; collective.

    Args:
        devices: device of each rank of the group.
    """
    place = layout.topology.place(group.rank)
    carrier = layout.carrier(layout.topology.ranks, group.everyone)
    unit = dataclasses.replace(group, comm=group.split(units), ranks=layout.topology.ranks)
    comms = Communicators(
        placed=unit,
        stage=group.split(units, [collectives_backend(carrier)] * len(units)),
        stage_host=unit.comm if carrier != "cpu" else None,
        activations=None,
        results=None,
        machine=None,
        channel=ControlChannel(group.split(units), Command, WorkerStats),
        drafts=None,
    )
    device = torch_device(layout.devices[group.rank])
    room = memory_share(group, devices) * CACHE_FRACTION
    tokens = max(rows * min(seen, layout.max_model_len) for rows, seen in CONTEXTS)
    num_blocks = min(layout.blocks_for(tokens), int(room) // max(1, layout.block_bytes(place)))
    options = dataclasses.replace(
        options,
        cache=dataclasses.replace(options.cache, num_kv_blocks=max(1, num_blocks), weight_cache_size=0.0),
        scheduler=dataclasses.replace(
            options.scheduler,
            max_num_seqs=max(DECODE_ROWS),
            preemption_mode="recompute",
            max_inflight=1,
            speculative_config=None,
            # Dummy steps may have any size, so all layers keep all tokens.
            max_num_batched_tokens=layout.max_model_len,
            chunked_prefill_size=layout.max_model_len,
        ),
    )
    with group.raise_on_all_ranks():
        parts = build_placed(
            comms,
            options,
            layout.config,
            directory,
            layout,
            on_progress=lambda done, total: None,
            is_whole=False,
        )
    return LayerProfiler(
        comm=unit.comm,
        sum_ranks=sum_over_ranks(layout, parts.tp),
        runner=parts.worker.runner,
        device=device,
        sizes=parts.capacity.sizes,
        vocab_size=layout.config.vocab_size,
        quota_timer=QuotaTimer(cpu_share(group)),
    )


def sum_over_ranks(layout: Layout, tp: TensorParallelCommunicator) -> Callable[[torch.Tensor], torch.Tensor]:
    """``LayerProfiler.sum_ranks`` of the layout's row-parallel layers."""
    if not layout.reproducible:
        return tp.all_reduce
    sums = SegmentSum(partial(shard_columns, layout.config.hidden_size), tp)
    return lambda partial_TD: sums.add_ranks(partial_TD, sums.empty_sums(partial_TD, partial_TD.shape))


def _measure_until_possible(
    group: RankGroup, timer: LayerProfiler, layout: Layout, config: ModelConfig, on_progress: Callable[[str], None]
) -> tuple[HostCosts, bool]:
    """Costs of this rank's unit. If any rank has impossible times, all ranks measure again. Collective.

    Over all measurements, the minimum time of each step counts: other load only adds time.

    Returns:
        The costs, and whether they are possible. If not even after ``MAX_MEASUREMENTS``, they are used once and not cached.
    """
    times: dict[object, float] = {}

    def least(step: object, seconds: float) -> float:
        times[step] = min(seconds, times.get(step, seconds))
        return times[step]

    for _ in range(MAX_MEASUREMENTS):
        costs, problem = measure_costs(timer, layout, config, on_progress, least), ""
        try:
            costs.check_measured()
        except UserError as error:
            problem = str(error)
        if not any(group.comm.all_gather_bytes(problem.encode())):
            return costs, True
    if problem:
        logger.warning("the measured costs could not be saved, the next start measures again: %s", problem)
    return costs, not problem
