"""Checkpoints of NVIDIA's ModelOpt (TensorRT Model Optimizer): NVFP4, FP8 and MXFP8, one algorithm for all layers or one for each.

Their settings are the ``quantization_config`` of config.json, or in older checkpoints the file hf_quant_config.json.

Source: NVIDIA/Model-Optimizer, modelopt/torch/export/; vllm-project/vllm, model_executor/layers/quantization/modelopt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from labinfer.weights.formats.float4 import MODELOPT_NVFP4
from labinfer.weights.formats.format import Format, FormatByName
from labinfer.weights.formats.fp8 import MX_BLOCK, Fp8Format
from labinfer.weights.formats.plain import PlainFormat
from labinfer.weights.formats.settings import Settings, is_table, spellings
from labinfer.weights.json_file import read_optional

OWN_FILE = "hf_quant_config.json"
FORMATS: dict[str, Format] = {
    "NVFP4": MODELOPT_NVFP4,
    "W4A16_NVFP4": MODELOPT_NVFP4,
    "FP8": Fp8Format(None),
    "FP8_PB_WO": Fp8Format((128, 128)),
    "MXFP8": Fp8Format(MX_BLOCK),
}
MIXED = "MIXED_PRECISION"


def read_own_file(directory: Path) -> Mapping[str, Any] | None:
    """Settings in hf_quant_config.json, as a ``quantization_config``; None if there is no such file.

    Raises:
        UserError: the file is broken.
    """
    settings = read_optional(directory / OWN_FILE).get("quantization")
    return (
        {"quant_method": "modelopt"} | settings if isinstance(settings, dict) and settings.get("quant_algo") else None
    )


def read_modelopt(settings: Settings) -> FormatByName:
    """Format of each matrix of a checkpoint with ``quant_method`` modelopt."""
    algorithm = settings.choose("quant_algo", (*FORMATS, MIXED))
    if algorithm.endswith("NVFP4"):
        settings.choose("group_size", (16,), 16)
    plain, excluded = PlainFormat(), (*settings.names("ignore"), *settings.names("exclude_modules"))
    mixed = {}
    if algorithm == MIXED:
        layers = settings.inner("quantized_layers")
        mixed = {name: FORMATS[layers.inner(name).choose("quant_algo", tuple(FORMATS))] for name in layers.values}

    def choose(matrix: str) -> Format:
        if is_table(matrix) or any(_matches(path, excluded) for path in spellings(matrix)):
            return plain
        if algorithm == MIXED:
            return next((mixed[path] for path in spellings(matrix) if path in mixed), plain)
        return FORMATS[algorithm]

    return choose


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a shell pattern matches ``path``, or a pattern is the name of a module that contains it."""
    return any(fnmatchcase(path, pattern) or path.startswith(f"{pattern}.") for pattern in patterns)
