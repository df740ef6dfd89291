"""A model's config by its files: a Hugging Face directory's ``config.json``, or the metadata of a GGUF file; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.gguf.file import SUFFIX, GgufFile, is_gguf
from labinfer.weights.json_file import read_json, read_optional

CONFIG, GENERATION = "config.json", "generation_config.json"


def config_path(model: Path) -> Path:
    """The file that a model's config is in."""
    return model if is_gguf(model) else model / CONFIG


def read_config(model: Path) -> dict[str, Any]:
    """The values of ``config.json``.

    Raises:
        UserError: there is none, or it is broken.
    """
    if is_gguf(model):
        from labinfer.weights.gguf.config import gguf_config  # here, because every command imports this module

        return gguf_config(GgufFile(model))
    if not (model / CONFIG).exists() and (files := sorted(model.glob(f"*{SUFFIX}"))):
        raise UserError(f"{model} has no {CONFIG}, but GGUF files; give one of them, such as --model {files[0]}")
    return read_json(model / CONFIG)


def read_generation_config(model: Path) -> dict[str, Any]:
    """The values of ``generation_config.json``; empty where the model has none."""
    if is_gguf(model):
        from labinfer.weights.gguf.config import gguf_generation_config  # here, as above

        return gguf_generation_config(GgufFile(model))
    return read_optional(model / GENERATION)
