"""Layout of a probe: one stage of a few layers of every kind, with embedding and LM head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.devices import DeviceName, machine_names, resolve_devices
from labinfer.comm.spmd.machine import RankInfo, last_level_caches
from labinfer.comm.spmd.topology import per_stage
from labinfer.launch.layout.layout import Layout, make_layout
from labinfer.launch.measure.layer_fit import CHUNK_BEFORE
from labinfer.models.config import LayerConfig, ModelConfig
from labinfer.models.layers.segments import DEGREES
from labinfer.native.cache_file import digest
from labinfer.weights.loader import weight_bytes

LEAST_BYTES = 64 << 20
"""Minimum weight bytes, before packing, of the loaded layers of each kind."""
CACHES = 2
"""Minimum weight bytes of the loaded layers of each kind, as a multiple of the last-level caches: a stage reads its weights from memory."""
MIN_LAYERS = 2
"""Minimum number of layers of each kind, if the model has them. Chunks, which are compute-bound, run through one layer."""

Units = list[tuple[int, ...]]
"""Ranks of each possible stage; every rank is in exactly one unit."""


def probed_devices(options: EngineOptions, everyone: Sequence[RankInfo]) -> dict[int, DeviceName]:
    """Device of each rank by ``--device``: one value for all ranks, or one per rank.

    Raises:
        UserError: there is another number of values, or torch has no such device on a rank's node.
    """
    return resolve_devices(
        dict(enumerate(per_stage("--device", options.parallel.device, len(everyone), "rank"))), everyone
    )


def name_machines(options: EngineOptions, everyone: Sequence[RankInfo]) -> tuple[list[str], list[str]]:
    """Name of each rank's machine (see ``machine_names``), and each rank's device; no devices if ``--device`` has one value.

    Raises:
        UserError: see ``probed_devices``.
    """
    devices = probed_devices(options, everyone)
    names = list(map(str, devices.values())) if len(options.parallel.device) > 1 else []
    return machine_names(devices, everyone), names


def split_machines(machines: Sequence[str], options: EngineOptions) -> Units:
    """Divide the ranks of each machine into units (possible stages) of the tensor-parallel degree.

    Args:
        machines: name of each rank's machine, see ``machine_names``.

    Raises:
        UserError: several degrees are given, or the degree does not divide a machine's number of ranks.
    """
    degrees = options.parallel.tensor_parallel_size
    if len(degrees) > 1:
        raise UserError(
            f"--tensor-parallel-size {','.join(map(str, degrees))}: probe measures one tensor-parallel size at a "
            "time; give one number"
        )
    units: Units = []
    for name, ranks in ranks_by_machine(machines).items():
        if len(ranks) % degrees[0]:
            raise UserError(
                f"--tensor-parallel-size {degrees[0]} does not divide the number of ranks on {name}, {len(ranks)}; start a "
                "multiple of it there"
            )
        units += _split(ranks, degrees[0])
    return units


def all_degrees(machines: Sequence[str], config: ModelConfig, options: EngineOptions) -> list[Units]:
    """Units for each of several probes, covering all tensor-parallel degrees that divide a machine's ranks and that the model and
    ``--reproducible`` support.

    Machines with fewer degrees than others repeat their last one.

    Args:
        machines: name of each rank's machine, see ``machine_names``.
    """
    groups = list(ranks_by_machine(machines).values())
    allowed = DEGREES if options.model.is_reproducible else range(1, len(machines) + 1)
    degrees = [
        [degree for degree in sorted(allowed) if len(ranks) % degree == 0 and _allows(config, degree)]
        for ranks in groups
    ]
    return [
        [
            unit
            for ranks, own in zip(groups, degrees, strict=True)
            for unit in _split(ranks, own[min(number, len(own) - 1)])
        ]
        for number in range(max(map(len, degrees)))
    ]


def _allows(config: ModelConfig, degree: int) -> bool:
    try:
        for layer in config.layers:
            layer.mixer.check(degree)
    except UserError:
        return degree == 1
    return True


def _split(ranks: Sequence[int], degree: int) -> Units:
    return [tuple(ranks[begin : begin + degree]) for begin in range(0, len(ranks), degree)]


def ranks_by_machine(machines: Sequence[str]) -> dict[str, list[int]]:
    """Ranks of each machine, in the order of their lowest ranks.

    Args:
        machines: name of each rank's machine.
    """
    by_machine: dict[str, list[int]] = {}
    for rank, name in enumerate(machines):
        by_machine.setdefault(name, []).append(rank)
    return by_machine


def kind_name(layer: LayerConfig) -> str:
    """Name of a kind of layers; equal for layers of equal shapes."""
    return f"{type(layer.mixer).__name__}+{type(layer.mlp).__name__}-{digest(layer)[:6]}".replace("Config", "")


def layer_places(layers: Sequence[LayerConfig], num_bytes: Mapping[str, int]) -> dict[str, list[int]]:
    """Indices of the layers to measure, by kind: the first ones of each kind, as many as have ``measured_bytes`` of
    weights together, but at least ``MIN_LAYERS``.

    Args:
        num_bytes: weight bytes of a layer of each kind.
    """
    places: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        places.setdefault(kind_name(layer), []).append(number)
    least = measured_bytes()
    return {kind: numbers[: max(MIN_LAYERS, -(-least // max(1, num_bytes[kind])))] for kind, numbers in places.items()}


def measured_bytes() -> int:
    """Minimum weight bytes (before packing) of the layers of one kind that a probe loads: more than the caches hold, so that the
    timed layers read their weights from memory, as in a run."""
    return max(LEAST_BYTES, CACHES * last_level_caches())


def measured_places(layout: Layout) -> dict[str, list[int]]:
    """Indices of the layers to measure, by kind; see ``layer_places``. Uses the weight bytes of the first rank's
    layers."""
    stage = layout.meta(layout.topology.places[0]).model.model.layers
    num_bytes: dict[str, int] = {}
    for number, layer in enumerate(layout.config.layers):
        kind = kind_name(layer)
        if kind not in num_bytes:
            num_bytes[kind] = weight_bytes(stage[str(number)])
    return layer_places(layout.config.layers, num_bytes)


def make_unit_layout(
    options: EngineOptions,
    config: ModelConfig,
    everyone: Sequence[RankInfo],
    unit: Sequence[int],
    devices: Mapping[int, DeviceName],
) -> Layout:
    """Layout of a unit as one stage: the first layers of the model, with embedding and LM head.

    Args:
        unit: ranks of the unit, with devices of one type.
        devices: device of each rank.

    Raises:
        UserError: see ``make_layout``.
    """
    length = min(
        config.max_position,
        sum(CHUNK_BEFORE),
        options.model.max_model_len or config.exact_context or config.max_position,
    )
    options = dataclasses.replace(
        options,
        parallel=dataclasses.replace(
            options.parallel,
            tensor_parallel_size=(len(unit),),
            pipeline_parallel_size=1,
            layers=(),
            ranks=(),
            device=(devices[unit[0]].type,),
        ),
        model=dataclasses.replace(options.model, max_model_len=length),
    )
    layout = make_layout(options, config, [everyone[rank] for rank in unit])
    last = max(numbers[-1] for numbers in measured_places(layout).values())
    return dataclasses.replace(
        layout,
        config=dataclasses.replace(config, layers=config.layers[: last + 1]),
        topology=dataclasses.replace(layout.topology, layers=((0, last + 1),), ranks=tuple(unit)),
        devices={rank: devices[rank] for rank in unit},
        _meta={},
    )


def model_name(config: ModelConfig) -> str:
    """Name that identifies the shapes of a model's layers, embedding and LM head."""
    shapes = (
        config.vocab_size,
        config.hidden_size,
        config.tied_embeddings,
        [kind_name(layer) for layer in config.layers],
        *([] if config.layer_inputs is None else [config.layer_inputs]),
    )
    return f"{config.architecture}-{digest(shapes)[:8]}"
