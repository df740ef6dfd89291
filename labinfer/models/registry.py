"""Loading of a checkpoint's config, and the class of its family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msgspec import structs

from labinfer.base.errors import UserError
from labinfer.base.pooling import PoolingConfig
from labinfer.base.registry import REGISTRY
from labinfer.models.architectures import refuse_unknown
from labinfer.models.config import ModelConfig
from labinfer.models.config_file import ConfigFile
from labinfer.models.decoder import Decoder
from labinfer.weights.model_files import open_model

OWN_HEAD = (
    "tie_word_embeddings is true, but the checkpoint has an output head that differs from the embedding; the head "
    "is used, as in Transformers. Set tie_word_embeddings to false in config.json to silence this warning"
)
LOST_HEAD = (
    "the checkpoint has no output head (lm_head), and tie_word_embeddings is false: only embeddings work, and "
    "generation requests are rejected. To generate text, download the missing file, or set tie_word_embeddings to "
    "true if the head is the embedding"
)


def load_config(directory: Path, *, with_mtp: bool = False) -> ModelConfig:
    """Read a checkpoint's config.

    Args:
        with_mtp: whether to load the MTP layer, if there is one.

    Raises:
        UserError: the config is missing or broken, or its architecture or quantization is not supported.
    """
    files = open_model(directory)
    file = ConfigFile(files)
    refuse_unknown(file.path, file.values)
    formats = files.formats()  # refuses what is not supported before anything is loaded
    family = REGISTRY.find("model_family", file.architecture)
    config = replace(family.read_config(file), formats=formats)
    pooling = files.pooling(file.values)
    if not config.tied_embeddings and not files.has_head():
        is_published_so = file.is_base_model or pooling is not None or not config.is_causal
        notes = config.notes if is_published_so else (*config.notes, LOST_HEAD)
        config = replace(config, tied_embeddings=True, has_head=False, notes=notes)
    elif config.tied_embeddings and files.has_different_head(family.names):
        config = replace(config, tied_embeddings=False, notes=(*config.notes, OWN_HEAD))
    is_embedder = file.is_base_model or bool(config.no_generation)
    allowed = file.get("matryoshka_dimensions", list, [])
    file.require(
        all(type(number) is int and 0 < number <= config.hidden_size for number in allowed),
        f"matryoshka_dimensions should be numbers from 1 to {config.hidden_size}, not {allowed!r:.80}",
    )
    pooling = pooling or PoolingConfig(is_embedder=is_embedder)
    config = replace(config, pooling=structs.replace(pooling, matryoshka_dimensions=tuple(allowed)))
    return config if with_mtp else replace(config, mtp=None)


def model_class(config: ModelConfig) -> type[Decoder]:
    """Family class of ``config``."""
    return REGISTRY.find("model_family", config.architecture)


def with_window(config: ModelConfig, window: int) -> ModelConfig:
    """``config`` with a sliding window of ``window`` tokens in every attention layer.

    Raises:
        UserError: the model is not causal.
    """
    if not config.is_causal:
        raise UserError("--sliding-window needs a causal model; this model has is_causal: false")
    layers = tuple(replace(layer, mixer=layer.mixer.with_window(window)) for layer in config.layers)
    return replace(config, layers=layers)
