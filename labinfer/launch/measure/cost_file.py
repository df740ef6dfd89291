"""Files that cache costs and plans for later starts: one for each rank, model, dtype and CPU quota."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plugins import PLUGINS
from labinfer.comm.group.rank_group import RankGroup
from labinfer.functions.provider import Provider
from labinfer.launch.layout.layout import Layout
from labinfer.launch.measure.layer_fit import CHUNK_BEFORE, CHUNK_ROWS, CONTEXTS, DECODE_ROWS, HEAD_ROWS
from labinfer.launch.measure.probe_layout import MIN_LAYERS, kind_name, measured_bytes, model_name
from labinfer.models.config import ModelConfig
from labinfer.native.cache_file import Damaged, digest, read_sealed, write_sealed

logger = logging.getLogger(__name__)

COST_FORMAT = 5
"""Version of the measuring method and file format. Files of other versions are not used."""

Costs = TypeVar("Costs")


def read_costs(
    path: Path | None, kind: type[Costs], check: Callable[[Costs], None] = lambda costs: None
) -> Costs | None:
    """Costs, or a plan made from costs, read from a cache file; None if the file is missing, damaged or invalid.

    Args:
        check: raises a ``UserError`` for impossible costs.
    """
    if path is None:
        return None
    try:
        costs = msgspec.json.decode(read_sealed(path), type=kind)
        check(costs)
    except FileNotFoundError:
        return None
    except (Damaged, UserError, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is ignored (%s) and measured again", path, error)
        return None
    return costs


def write_costs(path: Path | None, costs: Any) -> None:
    """Write ``costs`` to a cache file atomically, as several processes may write it at once. An error is only logged."""
    if path is None:
        return
    try:
        write_sealed(path, msgspec.json.encode(costs))
    except OSError as error:
        logger.info("the measured costs could not be saved: %s", error)


def file_name(
    group: RankGroup, options: EngineOptions, layout: Layout, config: ModelConfig, providers: Sequence[Provider]
) -> str:
    """File name that encodes everything that the costs depend on."""
    here, place = group.everyone[group.rank], layout.topology.place(group.rank)
    key = digest(
        (labinfer.__version__, COST_FORMAT),
        [provider.fingerprint() for provider in providers],
        PLUGINS.computing_code(),
        model_name(config),
        [kind_name(layer) for layer in config.layers],
        (layout.dtype(place), layout.kv_dtype(place), layout.quantization_name(place), layout.quantization_group_size),
        (options.model.functions, options.model.autotune == "off", layout.experts[place.stage], layout.reproducible),
        (options.cache.tokens_per_block, layout.max_model_len),
        (layout.weights, place.tp_size, place.tp_rank, layout.devices[group.rank].type),
        (group.threads.count, len(group.threads.bound_to), here.cpu_limit),
        [info.rank for info in group.everyone if info.node == here.node].index(
            group.rank
        ),  # equal ranks may differ in speed
        sum(info.node == here.node for info in group.everyone),  # ranks of a node share its memory bandwidth
        (measured_bytes(), MIN_LAYERS, DECODE_ROWS, CHUNK_ROWS, HEAD_ROWS, CONTEXTS, CHUNK_BEFORE),
    )
    return f"host-{key}.json"
