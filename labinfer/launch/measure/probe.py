"""Costs of hosts: seconds of a model's layers, head and steps, measured with the model runner that serves.

Loads a few layers of the model, with embedding and LM head, and runs dummy steps through them. Their weights exceed the CPU
caches, since a stage reads its weights from memory.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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
from labinfer.functions.calls import PagedAttentionCall
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
    CHUNK_ROWS,
    CONTEXTS,
    DECODE_ROWS,
    FEW_TOKENS,
    HEAD_ROWS,
    fit_layer,
    make_points,
)
from labinfer.launch.measure.layer_profiler import LayerProfiler
from labinfer.launch.measure.probe_layout import (
    Units,
    all_degrees,
    kind_name,
    make_unit_layout,
    measured_places,
    model_name,
    probed_devices,
    ranks_by_machine,
    split_machines,
)
from labinfer.launch.measure.quota_timer import QuotaTimer
from labinfer.launch.providers import collectives_backend, describe_device
from labinfer.launch.tune import cache_folder, prepare_providers
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.layers.mixer import Mixer
from labinfer.models.layers.segments import SegmentSum
from labinfer.models.layers.sharding import shard_columns
from labinfer.native.cache_file import digest
from labinfer.planner.cluster import Cluster, Machine, MachinePairLink, NetworkLink, check_link
from labinfer.planner.costs import MIXER_SUMS, DraftBytes, HostCosts, LayerCosts, Points
from labinfer.planner.merge_costs import merge_points, merge_ranks
from labinfer.planner.overheads import Overheads
from labinfer.planner.step_shape import StepShape
from labinfer.weights.loader import weight_bytes
from labinfer.worker.step_graphs import CAPTURED_BYTES, find_capture

logger = logging.getLogger(__name__)

CACHE_FRACTION = 0.25
"""Maximum fraction of the free memory for the KV cache of a probe."""
STARTED_BYTES = 16 << 20
"""Memory that a CPU rank uses at startup besides weights, before KV blocks are counted: modules, buffers, page tables,
and fragments of freed memory."""
FILL_TOKENS = 128
"""Length of the prompt whose keys and values fill the cache."""
MAX_MEASUREMENTS = 4
"""Maximum number of repeated measurements while a disturbed machine gives impossible times."""
FEW_SEQUENCES = 16
"""Batch size of the second step whose inputs are timed; the first one has a batch size of 1."""


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
    providers = prepare_providers(group, device)
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
        costs, problem = _measure(timer, layout, config, on_progress, least), ""
        try:
            costs.check_measured()
        except UserError as error:
            problem = str(error)
        if not any(group.comm.all_gather_bytes(problem.encode())):
            return costs, True
    if problem:
        logger.warning("the measured costs could not be saved, the next start measures again: %s", problem)
    return costs, not problem


def _measure(
    timer: LayerProfiler,
    layout: Layout,
    config: ModelConfig,
    on_progress: Callable[[str], None],
    least: Callable[[object, float], float],
) -> HostCosts:
    """Measure the costs of this rank's unit.

    Args:
        least: takes a step and its seconds; returns the minimum of the seconds over all measurements of this step so
            far.
    """
    decoder, place, length = timer.runner.model, layout.topology.places[0], timer.sizes.max_model_len
    few = min(FEW_TOKENS, length)
    timer.fill_cache(min(FILL_TOKENS, length))
    most = min(max(DECODE_ROWS), timer.sizes.num_states or max(DECODE_ROWS))
    decode_rows = [rows for rows in DECODE_ROWS if rows <= most]
    chunk_rows = [rows for rows in CHUNK_ROWS if rows <= length]
    on_progress("embedding and head")
    embed_rows = (1, *chunk_rows[-1:])
    embed = make_points(
        {rows: least(("embed", rows), timer.time_embedding(timer.chunk(rows, 0))) for rows in embed_rows}
    )
    inputs = make_points(
        {rows: least(("inputs", rows), timer.time_layer_inputs(timer.chunk(rows, 0))) for rows in embed_rows}
    )
    before = merge_points([embed, inputs], sum)
    head_rows = [rows for rows in HEAD_ROWS if rows <= most]
    head = make_points({rows: least(("head", rows), timer.time_head(timer.decodes(rows, few))) for rows in head_rows})
    places = measured_places(layout)
    layers = {kind: decoder.model.layers[str(numbers[0])] for kind, numbers in places.items()}
    fixed, overheads = _measure_inputs(timer, few, min(FEW_SEQUENCES, most))
    width, dtype = config.hidden_size, layout.dtype(place)
    sums = Points([], [])
    if place.tp_size > 1:
        sizes = (1, decode_rows[-1], *chunk_rows[-1:])
        sums = make_points({rows * width * dtype.itemsize: timer.time_sum(rows, width, dtype) for rows in sizes})
    kinds: dict[str, LayerCosts] = {}
    skipped = Points([], [])
    for kind, numbers in places.items():
        on_progress(f"layers of kind {len(kinds) + 1} of {len(places)}")
        seconds = _layer_timer(timer, numbers, before, least)

        num_sums = MIXER_SUMS + config.layers[numbers[0]].mlp.num_sums

        def own_seconds(
            shape: StepShape, seconds: Callable[[StepShape], float] = seconds, num_sums: int = num_sums
        ) -> float:
            share = inputs.at(shape.rows) / len(decoder.model.layers)
            return seconds(shape) + share - num_sums * sums.at(shape.rows * width * dtype.itemsize)

        window = _window(layers[kind].self_attn)
        fitted = fit_layer(own_seconds, most_decodes=decode_rows[-1], length=length, window=window)
        kinds[kind] = msgspec.structs.replace(fitted, num_sums=num_sums)
        if kind == kind_name(config.layers[-1]):
            skipped = _measure_skipped(timer, numbers, chunk_rows[:1] + chunk_rows[1:][-1:], seconds, before)
    specs = {kind: layer.self_attn.cache_spec() for kind, layer in layers.items()}
    input_bytes = 0
    if (layer_inputs := getattr(decoder.model, "layer_inputs", None)) is not None:
        input_bytes = weight_bytes(layer_inputs) // len(decoder.model.layers)
    kv_dtype = layout.kv_dtype(place)
    return HostCosts(
        name="",
        model=model_name(config),
        dtype=str(dtype).removeprefix("torch."),
        quantization=layout.quantization_name(place),
        tp_size=place.tp_size,
        memory=0,
        layers=[kind_name(layer) for layer in config.layers],
        last_cut=config.last_cut,
        layer_kinds=kinds,
        head=head,
        embed=embed,
        fixed=fixed,
        all_reduce=sums,
        skipped=skipped,
        overheads=overheads,
        hidden_bytes=width * dtype.itemsize,
        embedded_bytes=(config.activation_size - width) * dtype.itemsize,
        layer_bytes={kind: weight_bytes(layer) + input_bytes for kind, layer in layers.items()},
        embedding_bytes=weight_bytes(decoder.model.embed_tokens),
        head_bytes=weight_bytes(decoder.lm_head),
        shared_bytes=weight_bytes(decoder.lm_head) if decoder.lm_head is decoder.model.embed_tokens else 0,
        kv_bytes={kind: spec.bytes_per_token(kv_dtype) for kind, spec in specs.items()},
        state_bytes={kind: spec.bytes_per_sequence for kind, spec in specs.items()},
    )


def _measure_inputs(timer: LayerProfiler, few: int, most: int) -> tuple[float, Overheads]:
    """Seconds to prepare the inputs of a step of one sequence, and overheads of the plan and of each further sequence.

    Args:
        few: context length of each sequence.
        most: batch size of the second step.
    """
    single = timer.decodes(1, few)
    fixed, (encode, decode) = timer.time_inputs(single), timer.time_plan(single)
    sequence = 0.0
    if most > 1:
        sequence = max(0.0, timer.time_inputs(timer.decodes(most, few)) - fixed) / (most - 1)
    return fixed, Overheads(broadcast=encode, decode=decode, prepare_sequence=sequence)


def _layer_timer(
    timer: LayerProfiler, numbers: Sequence[int], before: Points, least: Callable[[object, float], float]
) -> Callable[[StepShape], float]:
    """Cached function that returns a layer's seconds in a step, all-reduces included. The constant time of a step counts as layer time:
    divided among the layers for decodes, added to one layer for chunks, which take much longer.

    Args:
        numbers: indices of the measured layers, all of one kind.
        before: seconds before the first layer (embedding and per-layer embeddings), by rows.
        least: see ``_measure``.
    """
    runners = {False: timer.runner.with_layers(numbers), True: timer.runner.with_layers(numbers[:1])}
    counts = {False: len(numbers), True: 1}

    @cache
    def seconds(shape: StepShape) -> float:
        is_chunk = bool(shape.chunks)
        total = least((tuple(numbers), shape), timer.time_layers(timer.plan(shape), runners[is_chunk]))
        return (total - before.at(shape.rows)) / counts[is_chunk]

    return seconds


def _measure_skipped(
    timer: LayerProfiler,
    numbers: Sequence[int],
    rows: Sequence[int],
    seconds: Callable[[StepShape], float],
    before: Points,
) -> Points:
    """Measure ``HostCosts.skipped`` with chunks of which one row is sampled.

    Args:
        numbers: indices of the measured layers, all of the kind of the model's last layer.
        rows: chunk sizes in tokens.
        seconds: seconds of such a layer when it computes all rows.
        before: see ``_layer_timer``.
    """
    runner, saved = timer.runner.with_layers(numbers[:1]), {0: 0.0}
    for size in rows:
        shape = StepShape(chunks=((size, 0),))
        less = timer.time_layers(timer.plan(shape), runner, all_rows=False) - before.at(size)
        saved[size - 1] = seconds(shape) - max(0.0, less)  # a layer saves no more than its own time
    return make_points(saved) if len(saved) > 1 else Points([], [])


def _window(mixer: Mixer) -> int:
    """Sliding window of a layer in tokens; 0 for full attention, or without attention."""
    return max((call.window for call in mixer.calls() if isinstance(call, PagedAttentionCall)), default=0)
