"""Any slice of a matrix in each format that is published, whose sizes fill neither words nor groups."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from published_formats import awq, fp8, gptq, packed, whole
from safetensors.torch import save_file

from labinfer.weights.codes import Codes, Range
from labinfer.weights.model_files import open_model
from labinfer.weights.slices import MatrixSlice

MATRIX = "model.layers.0.mlp.up_proj"
FORMATS: dict[str, Callable] = {
    "gptq": lambda size: gptq(4, size, sym=False),
    "gptq, 8 bits": lambda size: gptq(8, size, sym=False, version="gptq_v2"),
    "gptq, act-order": lambda size: gptq(4, size, sym=False, act_order=True),
    "awq": awq,
    "packed": lambda size: packed(4, size, sym=False),
    "packed, 8 bits": lambda size: packed(8, size, sym=True),
    "w8a8": lambda size: whole("channel"),
    "w8a8, groups": lambda size: whole("group", sym=False, size=max(16, size)),
    "fp8": lambda size: fp8("block"),
}
ROUNDED = ("gptq, act-order", "fp8")
"""Formats of which no codes are held as they are."""


def write(directory: Path, name: str, group: int, outputs: int, inputs: int) -> torch.Tensor:
    """A checkpoint of one matrix; returns its values."""
    config, store = FORMATS[name](group)
    tensors, values_OI = store(outputs, inputs)
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({f"{MATRIX}.{suffix}": tensor for suffix, tensor in tensors.items()}, directory / "model.safetensors")
    return values_OI


def some_of(size: int, rng: random.Random) -> Range:
    begin = rng.randrange(size)
    return begin, rng.randint(begin + 1, size)


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_any_slice_has_the_values_of_the_oracle(tmp_path, name, count):
    """In values, and in the codes that a rank would hold, decoded."""
    rng = random.Random(name)
    torch.manual_seed(0)
    for _ in range(count):
        group, outputs, inputs = rng.choice([16, 48, 128, 160, -1]), rng.randint(1, 40), rng.randint(1, 300)
        values_OI = write(tmp_path, name, group, outputs, inputs)
        rows, columns = some_of(outputs, rng), some_of(inputs, rng)
        expected = values_OI[slice(*rows), slice(*columns)]
        checkpoint = open_model(tmp_path).open_weights()
        matrix = partial(MatrixSlice, name=MATRIX, outputs=outputs, inputs=inputs, rows=rows, columns=columns)
        case = group, outputs, inputs, rows, columns
        decoded = torch.full(expected.shape, torch.nan)
        checkpoint.check(matrix(destination=decoded))
        checkpoint.load(matrix(destination=decoded))
        assert torch.equal(decoded, expected), case
        form = checkpoint.format(MATRIX).form("int8")
        codes = Codes.empty(form, len(expected), columns)
        checkpoint.load(matrix(destination=codes))
        checkpoint.functions.decode(
            codes.words.view(torch.uint8),
            codes.scales,
            codes.zeros,
            decoded,
            bits=form.bits,
            group=form.group,
            lead=codes.lead,
            skip=codes.lead,
        )
        limit = float(expected.abs().max()) / 250 if name in ROUNDED else 0.0
        assert float((decoded - expected).abs().max()) <= limit, case
