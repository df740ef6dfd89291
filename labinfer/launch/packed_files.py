"""packed_files: the cache of packed weights for the part of the model that a rank loads."""

from __future__ import annotations

from pathlib import Path

import torch

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.comm.spmd.topology import Place
from labinfer.functions.provider import Provider
from labinfer.launch.layout.layout import Layout
from labinfer.native.cache_file import digest
from labinfer.weights.packed_file import PackedFiles
from labinfer.weights.weight_cache import WeightCache, checkpoint_digest


def packed_files(
    cache: WeightCache | None,
    options: EngineOptions,
    layout: Layout,
    place: Place,
    directory: Path,
    *,
    providers: list[Provider],
) -> PackedFiles | None:
    """Cache of packed weights for this rank; None if disabled or if the weights are not in host memory."""
    if cache is None or layout.devices[place.rank].type != "cpu":
        return None
    begin, end = layout.topology.layers[place.stage]
    dtype = str(layout.dtype(place)).removeprefix("torch.")
    quantization = layout.quantization_name(place)
    form = dtype if quantization == "none" else f"{quantization} ({dtype})"
    part = f"tp {place.tp_rank} of {place.tp_size}" if place.tp_size > 1 else ""
    return PackedFiles(
        cache=cache,
        directory=directory,
        checkpoint=checkpoint_digest(directory),
        settings=digest(
            labinfer.__version__,
            [provider.fingerprint() for provider in providers],
            layout.rounding(place),
            layout.quantization_group_size,
        ),
        label=", ".join(filter(None, (f"layers {begin}-{end - 1}", part, form))),
        options=digest(options.weight_options),
        code=cache.code,
        num_threads=torch.get_num_threads(),
    )
