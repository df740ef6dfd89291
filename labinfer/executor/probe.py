"""Costs of hosts: seconds of a model's layers, head and steps on them, measured through the model runner that serves.

A few layers of the model are loaded, with both of its ends, and made-up steps are run through them, so that what is measured is
what runs. They are as many as no cache of a processor holds, since a stage reads its weights from memory.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

import labinfer
from labinfer.comm.control import ControlChannel
from labinfer.comm.links import measure_links
from labinfer.config import EngineOptions
from labinfer.errors import UserError
from labinfer.executor.build import Links, build_placed, cache_folder, find_model, prepare_providers
from labinfer.executor.step_timer import StepTimer
from labinfer.functions.provider import Provider
from labinfer.group.rank_group import RankGroup
from labinfer.layout.layout import Layout, make_layout
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.native.compiler import processor
from labinfer.plan import Command
from labinfer.planner.cluster import Cluster, Link, Machine, PairLink
from labinfer.planner.costs import SUMS_PER_LAYER, HostCosts, LayerCosts, Points
from labinfer.planner.step_shape import StepShape
from labinfer.rank_stats import WorkerStats
from labinfer.spmd.machine import RankInfo, free_memory
from labinfer.weights.loader import weight_bytes
from labinfer.weights.weight_cache import digest
from labinfer.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

LAYER_BYTES = 192 << 20
"""Weights, before they are packed, of as many layers as are loaded of each kind: more than caches hold of them."""
MIN_LAYERS = 2
"""Layers of a kind at least, where the model has them; chunks, which hardly wait for weights, run through no more."""
HEAD_ROWS = (1, 8, 9, 32, 64)
DECODE_ROWS = (1, 2, 4, 8, 9, 16, 32, 33, 64)
"""Sequences of steps that decode: both sides of every size at which implementations change."""
CHUNK_ROWS = (128, 129, 256, 512)
"""Tokens of chunks of a prompt."""
FEW_TOKENS = 64
"""Context of the sequences in steps whose attention is not what is measured."""
CONTEXTS = ((1, 4096), (8, 1024), (64, 1024))
"""Sequences and the context of each, in steps that measure the attention of decodes."""
CHUNK_BEFORE = (256, 3584)
"""Tokens of a chunk and those before it, in the step that measures the attention of chunks."""
CACHE_TOKENS = 1 << 16
"""Tokens of the KV cache, which the sequences of the largest step share out."""
CACHE_FRACTION = 0.25
"""Part of the free memory that it takes at most."""
FILL_TOKENS = 128


def probe_cluster(
    group: RankGroup, options: EngineOptions, on_progress: Callable[[str], None] = lambda text: None
) -> Cluster:
    """Costs of every machine of the group, and links between them; collective. All machines measure at once, as they will run.

    Args:
        on_progress: called with what is measured.

    Raises:
        AgreedError: the model, the devices or the memory are not as they should be, on any rank.
    """
    directory, config = find_model(group, options)
    with group.together():
        units = split_nodes(group.everyone, options)
        layout = make_unit_layout(options, config, group.everyone, units, group.rank)
    providers = prepare_providers(group, layout.devices[group.rank])
    folder, begin = cache_folder(), time.perf_counter()
    path = folder / _file_name(group, options, layout, config, providers) if folder is not None else None
    costs, memory = read_costs(path) if path is not None else None, _free_memory(group, layout)
    remembered = all(group.comm.all_gather_bytes(b"" if costs is None else b"known"))
    if not remembered:
        on_progress("loading some layers")
        timer = _make_timer(group, options, layout, directory, units)
        group.comm.barrier()
        costs = _measure(timer, layout, config, on_progress)
        if path is not None:
            write_costs(path, costs)
    here = group.everyone[group.rank]
    costs = msgspec.structs.replace(costs, name=here.node, hardware=describe_hardware(group), memory=memory)
    gathered = {
        rank: msgspec.json.decode(data, type=HostCosts)
        for rank, data in group.gather_bytes(msgspec.json.encode(costs)).items()
    }
    on_progress("links")
    by_node: dict[str, list[int]] = {}
    for info in group.everyone:
        by_node.setdefault(info.node, []).append(info.rank)
    nodes, firsts = list(by_node), [ranks[0] for ranks in by_node.values()]
    links = measure_links(group.comm, firsts)
    if group.rank == 0:
        how = "as measured before" if remembered else f"measured in {time.perf_counter() - begin:.1f} s"
        logger.info("costs of %d machine%s: %s", len(nodes), "s" * (len(nodes) > 1), how)
    return Cluster(
        machines=[
            Machine(name=node, costs=[gathered[ranks[0]]], num_ranks=len(ranks)) for node, ranks in by_node.items()
        ],
        links=[
            PairLink(a=nodes[a], b=nodes[b], link=Link(times.latency, times.bytes_per_second))
            for (a, b), times in links.items()
        ],
    )


def split_nodes(everyone: Sequence[RankInfo], options: EngineOptions) -> list[tuple[int, ...]]:
    """The ranks of each stage that could be: neighbours on a node, as many as the tensor-parallel degree.

    Raises:
        UserError: there are several degrees, or a node's ranks are no multiple of it.
    """
    degrees = options.parallel.tensor_parallel_size
    if len(degrees) > 1:
        raise UserError(
            f"--tensor-parallel-size {','.join(map(str, degrees))}: a probe measures one degree at a time; give one number"
        )
    by_node: dict[str, list[int]] = {}
    for info in everyone:
        by_node.setdefault(info.node, []).append(info.rank)
    units = []
    for node, ranks in by_node.items():
        if len(ranks) % degrees[0]:
            raise UserError(
                f"--tensor-parallel-size {degrees[0]} does not divide the number of ranks on {node}, {len(ranks)}; start a "
                "multiple of it there"
            )
        units += [tuple(ranks[begin : begin + degrees[0]]) for begin in range(0, len(ranks), degrees[0])]
    return units


def kind_name(layer: LayerConfig) -> str:
    """Name of a kind of layers, the same for layers of the same shape."""
    return f"{type(layer.mixer).__name__}+{type(layer.mlp).__name__}-{digest(layer)[:6]}".replace("Config", "")


def layer_places(layers: Sequence[LayerConfig], num_bytes: Mapping[str, int]) -> dict[str, list[int]]:
    """For each kind of layers the numbers of its first ones, as many as are measured.

    Args:
        num_bytes: weights of a layer of each kind.
    """
    places: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        places.setdefault(kind_name(layer), []).append(number)
    return {
        kind: numbers[: max(MIN_LAYERS, -(-LAYER_BYTES // max(1, num_bytes[kind])))] for kind, numbers in places.items()
    }


def measured_places(layout: Layout) -> dict[str, list[int]]:
    """``layer_places`` of the layers of one stage, by their weights in its first rank."""
    stage = layout.meta(layout.topology.places[0]).model.model.layers
    num_bytes: dict[str, int] = {}
    for number, layer in enumerate(layout.config.layers):
        kind = kind_name(layer)
        if kind not in num_bytes:
            num_bytes[kind] = weight_bytes(stage[str(number)])
    return layer_places(layout.config.layers, num_bytes)


def make_unit_layout(
    options: EngineOptions, config: ModelConfig, everyone: Sequence[RankInfo], units: Sequence[Sequence[int]], rank: int
) -> Layout:
    """One stage on the ranks that measure together with this one: the first layers of the model, with both of its ends.

    Raises:
        UserError: as ``make_layout``.
    """
    unit = next(ranks for ranks in units if rank in ranks)
    length = min(config.max_position, sum(CHUNK_BEFORE), options.model.max_model_len or config.max_position)
    options = dataclasses.replace(
        options,
        parallel=dataclasses.replace(options.parallel, pipeline_parallel_size=1, layers=(), ranks=()),
        model=dataclasses.replace(options.model, max_model_len=length),
    )
    layout = make_layout(options, config, [everyone[rank] for rank in unit])
    last = max(numbers[-1] for numbers in measured_places(layout).values())
    return dataclasses.replace(
        layout,
        config=dataclasses.replace(config, layers=config.layers[: last + 1]),
        topology=dataclasses.replace(layout.topology, layers=((0, last + 1),), ranks=tuple(unit)),
        devices={rank: layout.devices[number] for number, rank in enumerate(unit)},
        _meta={},
    )


def _make_timer(
    group: RankGroup, options: EngineOptions, layout: Layout, directory: Path, units: Sequence[Sequence[int]]
) -> StepTimer:
    """The layers, loaded on the ranks of each unit; collective."""
    place = layout.topology.place(group.rank)
    carrier = layout.carrier(layout.topology.ranks, group.everyone)
    own = dataclasses.replace(group, comm=group.split(units), ranks=layout.topology.ranks)
    links = Links(
        placed=own,
        stage=group.split(units, [carrier] * len(units)),
        activations=None,
        results=None,
        machine=None,
        channel=ControlChannel(group.split(units), Command, WorkerStats),
    )
    size, room = options.cache.block_size, _free_memory(group, layout) * CACHE_FRACTION
    num_blocks = min(CACHE_TOKENS // size, int(room) // max(1, layout.block_bytes(place, size)))
    options = dataclasses.replace(
        options,
        cache=dataclasses.replace(options.cache, num_kv_blocks=max(1, num_blocks), weight_cache_size=0.0),
        scheduler=dataclasses.replace(
            options.scheduler, max_num_seqs=max(DECODE_ROWS), preemption_mode="recompute", max_inflight=1
        ),
    )
    with group.together():
        parts = build_placed(
            links,
            options,
            layout.config,
            directory,
            layout,
            on_progress=lambda done, total: None,
            is_whole=False,
        )
    return StepTimer(
        comm=own.comm,
        tp=parts.tp,
        runner=parts.worker.runner,
        device=layout.devices[group.rank],
        block_size=size,
        num_blocks=parts.capacity.num_blocks,
        vocab_size=layout.config.vocab_size,
        num_states=parts.capacity.num_states,
        length=parts.capacity.max_model_len,
    )


def _measure(timer: StepTimer, layout: Layout, config: ModelConfig, on_progress: Callable[[str], None]) -> HostCosts:
    """Costs of this rank's unit. Its name and its memory are not known yet."""
    decoder, place = timer.runner.model, layout.topology.places[0]
    timer.fill_cache(min(FILL_TOKENS, timer.length))
    most = min(max(DECODE_ROWS), timer.num_states or max(DECODE_ROWS))
    decode_rows = [rows for rows in DECODE_ROWS if rows <= most]
    chunk_rows = [rows for rows in CHUNK_ROWS if rows <= timer.length]
    few = min(FEW_TOKENS, timer.length)
    on_progress("embedding and head")
    embed = _points({rows: timer.time_embedding(timer.chunk(rows, 0)) for rows in (1, *chunk_rows[-1:])})
    head = _points({rows: timer.time_head(timer.decodes(rows, few)) for rows in HEAD_ROWS if rows <= most})
    places = measured_places(layout)
    fixed = timer.time_inputs(timer.decodes(1, few))
    hidden_bytes = config.hidden_size * layout.dtype(place).itemsize
    sums = Points([], [])
    if place.tp_size > 1:
        sizes = (1, decode_rows[-1], *chunk_rows[-1:])
        width, dtype = config.hidden_size, layout.dtype(place)
        sums = _points({rows * hidden_bytes: timer.time_sum(rows, width, dtype) for rows in sizes})
    kinds: dict[str, LayerCosts] = {}
    for kind, numbers in places.items():
        on_progress(f"layers of kind {len(kinds) + 1} of {len(places)}")
        all_layers, few_layers = timer.runner.part(numbers), timer.runner.part(numbers[:MIN_LAYERS])

        def seconds(
            shape: StepShape,
            runners: tuple[ModelRunner, ModelRunner] = (all_layers, few_layers),
            counts: tuple[int, int] = (len(numbers), len(numbers[:MIN_LAYERS])),
        ) -> float:
            """A layer's part of a step, without sums."""
            runner, count = runners[bool(shape.chunks)], counts[bool(shape.chunks)]
            layers = timer.time_layers(timer.plan(shape), runner) - embed.at(shape.rows)
            return layers / count - SUMS_PER_LAYER * sums.at(shape.rows * hidden_bytes)

        kinds[kind] = fit_layer(seconds, most_decodes=decode_rows[-1], length=timer.length)
    layers = [decoder.model.layers[str(numbers[0])] for numbers in places.values()]
    specs = [layer.self_attn.cache_spec() for layer in layers]
    kv_dtype = layout.kv_dtype(place)
    return HostCosts(
        name="",
        model=model_name(config),
        dtype=str(layout.dtype(place)).removeprefix("torch."),
        quantization=layout.quantization_name,
        tp_size=place.tp_size,
        memory=0,
        layers=[kind_name(layer) for layer in config.layers],
        layer_kinds=kinds,
        head=head,
        embed=embed,
        fixed=fixed,
        all_reduce=sums,
        hidden_bytes=hidden_bytes,
        layer_bytes={kind: weight_bytes(layer) for kind, layer in zip(places, layers, strict=True)},
        embedding_bytes=weight_bytes(decoder.model.embed_tokens),
        head_bytes=weight_bytes(decoder.lm_head),
        shared_bytes=weight_bytes(decoder.lm_head) if decoder.lm_head is decoder.model.embed_tokens else 0,
        kv_bytes={kind: spec.bytes_per_token(kv_dtype) for kind, spec in zip(places, specs, strict=True)},
        state_bytes={kind: spec.bytes_per_sequence for kind, spec in zip(places, specs, strict=True)},
    )


def fit_layer(seconds: Callable[[StepShape], float], *, most_decodes: int, length: int) -> LayerCosts:
    """Costs of a layer, from steps of which each differs from another one in one thing.

    What a decode's or a chunk's attention takes however few tokens are seen counts as work by rows.

    Args:
        seconds: a layer's part of a step of decodes that see as many tokens each, or of one chunk.
        most_decodes: sequences that a step can have.
        length: tokens that a sequence can have.
    """
    few = min(FEW_TOKENS, length)
    by_rows = {rows: seconds(StepShape(rows, rows * few)) for rows in DECODE_ROWS if rows <= most_decodes}
    per_token = _slope(
        [
            (rows * (context - few), seconds(StepShape(rows, rows * context)) - by_rows[rows], by_rows[rows])
            for rows, context in ((rows, min(context, length)) for rows, context in CONTEXTS)
            if rows in by_rows and context > few
        ]
    )
    chunks = {rows: seconds(StepShape(chunks=((rows, 0),))) for rows in CHUNK_ROWS if rows <= length}
    size, before = CHUNK_BEFORE[0], min(CHUNK_BEFORE[1], length - CHUNK_BEFORE[0])
    per_pair = 0.0
    if size in chunks and before > 0:
        more = seconds(StepShape(chunks=((size, before),))) - chunks[size]
        per_pair = _slope([(size * before, more, chunks[size])])
    linear = {rows: time - per_token * rows * few for rows, time in by_rows.items()}
    linear |= {rows: time - per_pair * rows * rows / 2 for rows, time in chunks.items()}
    return LayerCosts(_points(linear), Points([], []), decode=(0.0, 0.0, per_token), chunk=(0.0, 0.0, per_pair))


def _slope(points: Sequence[tuple[float, float, float]]) -> float:
    """Slope of the line through 0 with the least squares of relative errors, at least 0.

    Args:
        points: size, seconds, and the seconds that the error of these is compared with.
    """
    points = [(size / base, time / base) for size, time, base in points]
    return max(0.0, sum(x * y for x, y in points) / (sum(x * x for x, _ in points) or 1.0))


def _points(seconds: Mapping[int, float]) -> Points:
    return Points([float(size) for size in seconds], [max(0.0, time) for time in seconds.values()])


def model_name(config: ModelConfig) -> str:
    """Name of the shapes of a model's layers and ends."""
    shapes = (
        config.vocab_size,
        config.hidden_size,
        config.tied_embeddings,
        [kind_name(layer) for layer in config.layers],
    )
    return f"{config.architecture}-{digest(shapes)[:8]}"


def describe_hardware(group: RankGroup) -> str:
    """The processor, and how much of it a rank has."""
    here, count = group.everyone[group.rank], group.threads.count
    lines = (line.partition(":") for line in processor().splitlines())
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    quota = f" of {here.cpu_limit:.3g} CPUs" if here.cpu_limit < count else ""
    return f"{(names or ['CPU'])[0]}, {count} thread{'s' * (count > 1)}{quota}"


def _free_memory(group: RankGroup, layout: Layout) -> int:
    """Bytes that are free for this rank, where the ranks of its node share them out."""
    here, device = group.everyone[group.rank], layout.devices[group.rank]
    on_node = sum(info.node == here.node for info in group.everyone)
    sharing = on_node if device.type == "cpu" else -(-on_node // max(1, here.num_accelerators))
    return free_memory(device) // sharing


# Costs are remembered, one file for each unit's circumstances.


def read_costs(path: Path) -> HostCosts | None:
    """Costs from a file; None where there is none, or it is not one of this version's."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=HostCosts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write_costs(path: Path, costs: HostCosts) -> None:
    """Write the file as a whole, so that several processes may write it at once; nowhere where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            unfinished = Path(directory) / path.name
            unfinished.write_bytes(msgspec.json.encode(costs))
            os.replace(unfinished, path)
    except OSError as error:
        logger.info("the costs could not be kept: %s", error)


def _file_name(
    group: RankGroup, options: EngineOptions, layout: Layout, config: ModelConfig, providers: Sequence[Provider]
) -> str:
    """Name of the file for costs of these circumstances."""
    here, place = group.everyone[group.rank], layout.topology.place(group.rank)
    circumstances = digest(
        labinfer.__version__,
        [provider.fingerprint() for provider in providers],
        model_name(config),
        [kind_name(layer) for layer in config.layers],
        (layout.dtype(place), layout.kv_dtype(place), layout.quantization_name, layout.quantization_group_size),
        (options.model.functions, options.model.autotune == "off", layout.experts[place.stage], layout.head_preview),
        (options.cache.block_size, layout.max_model_len),
        (layout.weights, place.tp_size, place.tp_rank, layout.devices[group.rank].type),
        (group.threads.count, len(group.threads.bound_to), here.cpu_limit),
        sum(info.node == here.node for info in group.everyone),  # they share the memory
        (LAYER_BYTES, MIN_LAYERS, DECODE_ROWS, CHUNK_ROWS, HEAD_ROWS, CONTEXTS, CHUNK_BEFORE),
    )
    return f"host-{circumstances}.json"
