"""Blocks of every GGUF type against gguf-py, which computes them with numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from labinfer.weights.gguf.blocks import DECODERS, FLOATS, decode_numbers, decode_values
from labinfer.weights.gguf.types import TYPES, UNSUPPORTED_TYPES


@pytest.mark.parametrize("number", TYPES, ids=[kind.name for kind in TYPES.values()])
def test_blocks_have_the_values_of_the_reference(number):
    kind, other = TYPES[number], gguf.GGMLQuantizationType(number)
    assert (kind.name, (kind.size, kind.num_bytes)) == (other.name, gguf.GGML_QUANT_SIZES[other])
    blocks = np.random.default_rng(number).integers(0, 256, (3000, kind.num_bytes), dtype=np.uint8)
    blocks[:256, 0] = np.arange(256)  # every exponent of MXFP4
    with np.errstate(all="ignore"):  # random bytes are also infinite scales
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, other))
    values = decode_values(kind, torch.from_numpy(blocks))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected.view_as(values), rtol=0, atol=0, equal_nan=True)


def test_numbers_are_small_and_scales_are_of_equal_groups():
    for kind in TYPES.values():
        if kind.name in FLOATS:
            continue
        blocks = torch.randint(0, 256, (64, kind.num_bytes), dtype=torch.uint8)
        numbers = decode_numbers(kind, blocks)
        assert numbers.whole_NS.shape == (64, kind.size) and kind.size % numbers.scales_NG.shape[1] == 0
        assert numbers.whole_NS.min() >= -128 and numbers.whole_NS.max() <= 127


def test_types_are_those_of_the_reference():
    known = {number: kind.name for number, kind in TYPES.items()} | UNSUPPORTED_TYPES
    for kind in gguf.GGMLQuantizationType:
        assert known.get(kind.value, kind.name) == kind.name
    assert {kind.name for kind in TYPES.values()} == {*DECODERS, *FLOATS}
