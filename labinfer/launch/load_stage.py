"""A stage's checkpoint, opened and checked, and the stage's weights, loaded from it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from labinfer.base.config import EngineOptions
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.devices import torch_device
from labinfer.comm.spmd.machine import LARGEST_LOADED, keep_freed_memory
from labinfer.comm.spmd.topology import Place
from labinfer.functions.provider import Provider
from labinfer.launch.layout.layout import Layout
from labinfer.launch.mtp_check import check_mtp
from labinfer.launch.packed_files import packed_files
from labinfer.models.layers.context import StageContext
from labinfer.models.registry import model_class
from labinfer.weights.checkpoint import CheckpointReader
from labinfer.weights.files import weight_files
from labinfer.weights.loader import check_checkpoint, load_weights, weight_bytes, weight_slices
from labinfer.weights.model_files import open_model
from labinfer.weights.read_ahead import PacedReadAhead, Span, exceeds_page_cache
from labinfer.weights.tensor_files import TensorFiles
from labinfer.weights.weight_cache import WeightCache, checkpoint_digest

logger = logging.getLogger(__name__)


def open_stage(
    group: RankGroup,
    options: EngineOptions,
    directory: Path,
    layout: Layout,
    *,
    cache: WeightCache | None,
    is_whole: bool,
) -> CheckpointReader:
    """Open the checkpoint of a model. Rank 0 checks it against the whole model, unless ``cache`` knows the checkpoint.

    Args:
        cache: cache of packed weights.
        is_whole: whether the layout has all layers of the checkpoint.

    Raises:
        UserError: tensors are missing, unexpected, or have other shapes than the model's.
    """
    config, checkpoint = layout.config, open_model(directory).open_weights()
    check_mtp(options, config, directory, checkpoint.names)
    if group.rank > 0:
        return checkpoint
    if is_whole and not (cache is not None and cache.knows(checkpoint_digest(directory))):
        whole = layout.whole()
        model = whole.meta(whole.topology.place(0)).model
        check_checkpoint(model, checkpoint, config.tied_embeddings, options.model.ignore_tensors)
    decoded = set(layout.quantizations) == {"none"}
    for warning in (*config.notes, *(() if decoded else config.formats.warnings), config.pooling.warning):
        if warning:
            logger.warning("%s", warning)
    return checkpoint


def load_stage(
    checkpoint: CheckpointReader,
    options: EngineOptions,
    context: StageContext,
    layout: Layout,
    place: Place,
    *,
    directory: Path,
    providers: list[Provider],
    cache: WeightCache | None,
    on_progress: Callable[[int, int], None],
) -> nn.Module:
    """Build a rank's part of the model and load its weights, or map them from ``cache``."""
    device = torch_device(layout.devices[place.rank])
    with torch.device("meta"):
        model = model_class(layout.config)(layout.config, context).eval()
    for functions in filter(None, (provider.loading() for provider in providers)):
        checkpoint.functions = functions
    if device.type == "cpu":
        keep_freed_memory(LARGEST_LOADED)  # each decoded matrix reuses the memory of the ones before it
    packed = packed_files(cache, options, layout, place, directory, providers=providers)
    ahead = paced_read_ahead(model, checkpoint, layout)

    def note(done: int, total: int) -> None:
        ahead.advance(done)
        on_progress(done, total)

    with contextlib.closing(ahead):
        load_weights(model, checkpoint, device, note, packed)
    if device.type == "cpu":
        keep_freed_memory()
    logger.debug("weights loaded: %d MiB read", checkpoint.bytes_read >> 20)
    return model


def paced_read_ahead(model: nn.Module, checkpoint: CheckpointReader, layout: Layout) -> PacedReadAhead:
    """Read-ahead of the tensors that a rank loads, if the checkpoint is too large to be read ahead as a whole. GGUF files, and models
    whose experts stay on disk (``--expert-offload``), are not read ahead."""
    slices: list[tuple[int, list[Span]]] = []
    is_read = isinstance(checkpoint, TensorFiles) and not layout.expert_memory
    if is_read and exceeds_page_cache(sum(path.stat().st_size for path in weight_files(checkpoint.directory))):
        for part in weight_slices(model, model.names.resolve(checkpoint.names)):
            stored = [name for name in checkpoint.tensor_names(part) if name in checkpoint.names]
            slices.append((part.destination.nbytes, [checkpoint.span(name) for name in stored]))
    return PacedReadAhead(slices, drops=layout.topology.num_places == 1)


def gather_weight_bytes(group: RankGroup, model: nn.Module) -> tuple[int, ...]:
    """Weight bytes of each placed rank, by rank of the whole group; 0 for other ranks. Collective."""
    counts = group.comm.all_gather(torch.tensor([weight_bytes(model)]))
    by_rank = dict(zip(group.ranks, (int(count) for count in counts), strict=True))
    return tuple(by_rank.get(rank, 0) for rank in range(max(by_rank) + 1))
