"""Registry of storage formats, by ``quant_method`` of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from labinfer.base.errors import UserError
from labinfer.base.registry import REGISTRY
from labinfer.weights.formats.format import FormatByName, Formats
from labinfer.weights.formats.modelopt import read_own_file
from labinfer.weights.formats.plain import plain_formats
from labinfer.weights.formats.settings import Settings

WeightFormat = Callable[[Settings], FormatByName]
"""Reads the ``quantization_config`` of checkpoints with one ``quant_method``, under which it is registered.

Called on every rank when a model is loaded, and by ``launch.py plan``, before any weight is read. Returns a function from the name of a
matrix to its ``Format``, which is called once for each matrix; unquantized matrices get ``PlainFormat``. Raises ``UserError`` for
unsupported settings. ``Settings`` has typed access, and ``warn`` for warnings to the user. A ``Format`` decodes a slice of a matrix:
a rank reads only its rows and columns.
"""


def read_formats(config: Mapping[str, Any], path: Path) -> Formats:
    """Read the format of each matrix of a checkpoint.

    Args:
        config: contents of the checkpoint's config.json.
        path: path of config.json, for errors.

    Raises:
        UserError: the quantization is not supported.
    """
    quantization = config.get("quantization_config")
    if quantization is None and isinstance(config.get("text_config"), dict):  # Kimi K2.5 has it in text_config
        quantization = config["text_config"].get("quantization_config")
    if quantization is None:
        quantization = read_own_file(Path(path).parent)
    if quantization is None:
        return plain_formats()
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if not isinstance(method, str) or method not in REGISTRY.names("weight_format"):
        known = ", ".join(REGISTRY.names("weight_format"))
        raise UserError(
            f"{path}: quantization_config has quant_method {method!r}, which is not supported (supported: "
            f"{known}); use the unquantized checkpoint, with --quantization int8 or int4"
        )
    settings = Settings(quantization, directory=Path(path).parent)
    try:
        choose = REGISTRY.find("weight_format", method)(settings)
    except UserError as error:
        raise UserError(f"{path}: quantization_config ({method}): {error}") from None
    return Formats(cache(choose), quantization, settings.warnings, str(path))
