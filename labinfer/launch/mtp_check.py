"""check_mtp: verifies that a model has an MTP layer if one is to draft."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.speculative_options import FLAG
from labinfer.models.config import ModelConfig
from labinfer.models.registry import model_class


def check_mtp(
    options: EngineOptions, config: ModelConfig, directory: Path, tensors: Collection[str] | None = None
) -> None:
    """Check that the model has an MTP layer, if the options ask for one.

    Args:
        tensors: names of the checkpoint's tensors; None if it is not open yet.

    Raises:
        UserError: the model's family supports no MTP layer, or the checkpoint has none.
    """
    if not options.scheduler.has_mtp:
        return
    has_layer = config.mtp is not None
    if has_layer and tensors is not None:
        projection = model_class(config).names.with_mtp(config.num_layers).resolve(tensors).stored("mtp.fc")
        has_layer = any(name.startswith(f"{projection}.") for name in tensors)
    if not has_layer:
        raise UserError(f"{FLAG}: {directory} has no MTP layer; choose another method, such as ngram, or another model")
