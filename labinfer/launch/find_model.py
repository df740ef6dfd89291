"""find_model: directory and config of a model, verified to be equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.group.rank_group import RankGroup
from labinfer.launch.mtp_check import check_mtp
from labinfer.models.config import ModelConfig
from labinfer.models.registry import load_config, with_window
from labinfer.models.score_head import with_score_head
from labinfer.weights.model_files import open_model
from labinfer.weights.resolve import resolve_model


def find_model(
    group: RankGroup, options: EngineOptions, on_found: Callable[[Path], None] = lambda directory: None
) -> tuple[Path, ModelConfig]:
    """Directory and config of the model, on every rank. One rank of each node may download it first.

    Args:
        on_found: called with the directory before the config is read.

    Raises:
        CollectiveError: the model is not found, or its config differs between ranks.
    """
    model, model_dir = options.model.model, group.environment.model_dir
    hub = options.model.hub_or(group.environment.hub)
    downloads = group.environment.local_rank == 0
    with group.raise_on_all_ranks():
        if downloads:
            resolve_model(model, model_dir, may_download=True, hub=hub)
    with group.raise_on_all_ranks():
        directory = resolve_model(model, model_dir, may_download=False, hub=hub)
        on_found(directory)
        config = load_config(directory, with_mtp=options.scheduler.has_mtp)
        config = with_score_head(config, directory, options.model.reranker, options.model.tokenizer)
        check_mtp(options, config, directory)
    digests = group.comm.all_gather_bytes(hashlib.blake2b(repr(config).encode(), digest_size=16).digest())
    with group.raise_on_all_ranks():
        if digests[group.rank] != digests[0]:
            raise UserError(
                f"{open_model(directory).config_path} differs from rank 0's on {group.everyone[0].node}; put the same checkpoint on every node"
            )
    if window := options.model.sliding_window:
        with group.raise_on_all_ranks():
            config = with_window(config, window)
    return directory, config
