"""Formats by ``quant_method``, and the choice among them for each matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.weights.formats.awq import read_awq
from labinfer.weights.formats.compressed_tensors import read_compressed_tensors
from labinfer.weights.formats.format import FormatByName, Formats
from labinfer.weights.formats.fp8 import read_fp8
from labinfer.weights.formats.gptq import read_gptq
from labinfer.weights.formats.mxfp4 import read_mxfp4
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.settings import Settings

METHODS: dict[str, Callable[[Settings], FormatByName]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "mxfp4": read_mxfp4,
}
"""Readers of ``quantization_config``, by its ``quant_method``."""


def read_formats(config: Mapping[str, Any], path: Path) -> Formats:
    """The format of each matrix of a checkpoint.

    Args:
        config: the contents of its config.json.
        path: that file, for errors.

    Raises:
        UserError: a quantisation that is not supported.
    """
    quantization = config.get("quantization_config")
    if quantization is None and isinstance(config.get("text_config"), dict):  # as Kimi K2.5 has it
        quantization = config["text_config"].get("quantization_config")
    if quantization is None:
        return plain_formats()
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(
            f"{path}: quantization_config has quant_method {method!r}, which is not supported ({', '.join(METHODS)} can be "
            "read); take the checkpoint that is not quantised, with --quantization int8 or int4"
        )
    settings = Settings(quantization, directory=Path(path).parent)
    try:
        choose = METHODS[method](settings)
    except UserError as error:
        raise UserError(f"{path}: quantization_config ({method}): {error}") from None
    return Formats(cache(choose), quantization, settings.warnings, str(path))


def plain_formats() -> Formats:
    """All matrices in floating-point numbers."""
    plain = PlainFormat()
    return Formats(lambda matrix: plain)
