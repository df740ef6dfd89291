"""Decoders of GGUF's quantized blocks: integers, scales and minima.

Letters of shapes: N blocks, S values of a block, G groups of a block (with a scale each). A weight is ``number * scale + minimum``,
computed in float32 in that order.

Source: ggml-org/llama.cpp, ggml/src/ggml-common.h (the blocks) and ggml/src/ggml-quants.c (``dequantize_row_…``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labinfer.weights.formats.mxfp4 import E2M1, half_powers
from labinfer.weights.gguf.types import BlockType

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FOUR_BITS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Lookup table of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class Numbers:
    """Decoded blocks: quantized integers, with the scale and minimum of each group."""

    whole_NS: torch.Tensor
    """Quantized integers, int16 from -128 to 127."""
    scales_NG: torch.Tensor
    """Scales of the groups, float32."""
    minima_NG: torch.Tensor | None = None
    """Minima of the groups, float32; None if all are zero."""
    codes_NS: torch.Tensor | None = None
    """int16 indices into the lookup table of the block type; None if it has no table."""

    @property
    def values_NS(self) -> torch.Tensor:
        """Weights of the blocks, float32."""
        count, groups = self.scales_NG.shape
        values = self.whole_NS.float().view(count, groups, -1) * self.scales_NG.unsqueeze(2)
        if self.minima_NG is not None:
            values += self.minima_NG.unsqueeze(2)
        return values.view(count, -1)


def decode_values(block_type: BlockType, blocks_NB: torch.Tensor) -> torch.Tensor:
    """Weights of blocks of any type, dequantized: (N, S) float32.

    Args:
        blocks_NB: uint8, the bytes of each block.
    """
    if block_type.name in FLOATS:
        return blocks_NB.contiguous().view(FLOATS[block_type.name]).float()
    return decode_numbers(block_type, blocks_NB).values_NS


def decode_numbers(block_type: BlockType, blocks_NB: torch.Tensor) -> Numbers:
    """Integers and scales of blocks of a quantized type; see ``decode_values``."""
    return DECODERS[block_type.name](blocks_NB)


def _q4_0(blocks: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 2:]) - 8, _half(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: torch.Tensor) -> Numbers:
    return Numbers((_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4) - 16, _half(blocks[:, :2]))


def _q5_1(blocks: torch.Tensor) -> Numbers:
    whole = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Numbers(whole, _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q8_0(blocks: torch.Tensor) -> Numbers:
    return Numbers(_signed(blocks[:, 2:]), _half(blocks[:, :2]))


def _q4_k(blocks: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 16:], run=32), *_scales_and_minima(blocks))


def _q5_k(blocks: torch.Tensor) -> Numbers:
    low = _nibbles(blocks[:, 48:], run=32)
    high = torch.cat([(blocks[:, 16:48] >> bit & 1).to(torch.int16) for bit in range(8)], dim=1)
    return Numbers(low | high << 4, *_scales_and_minima(blocks))


def _q6_k(blocks: torch.Tensor) -> Numbers:
    low = _nibbles(blocks[:, :128], run=64)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1) & 3
    whole = (low | high.to(torch.int16).reshape(len(blocks), -1) << 4) - 32
    return Numbers(whole, _half(blocks[:, 208:]) * _signed(blocks[:, 192:208]).float())


def _iq4_nl(blocks: torch.Tensor) -> Numbers:
    return _look_up(FOUR_BITS, blocks[:, 2:], _half(blocks[:, :2]))


def _iq4_xs(blocks: torch.Tensor) -> Numbers:
    high = _unsigned(blocks[:, 2]) | _unsigned(blocks[:, 3]) << 8
    high = high.unsqueeze(1) >> torch.arange(0, 16, 2) & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).view(len(blocks), 8)
    scales = _half(blocks[:, :2]) * ((low | high << 4) - 32).float()
    return _look_up(FOUR_BITS, blocks[:, 8:], scales)


def _mxfp4(blocks: torch.Tensor) -> Numbers:
    return _look_up(E2M1, blocks[:, 1:], half_powers(_unsigned(blocks[:, :1])))


DECODERS: dict[str, Callable[[torch.Tensor], Numbers]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _nibbles(data: torch.Tensor, run: int = 16) -> torch.Tensor:
    """Codes of 4 bits as int16: from each ``run`` bytes of ``data``, first the low halves of all bytes, then the high halves."""
    runs = data.reshape(len(data), -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), dim=2).view(len(data), -1).to(torch.int16)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Bits of each byte in ``data``, lowest first, as int16."""
    return (data.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).view(len(data), -1).to(torch.int16)


def _half(data: torch.Tensor) -> torch.Tensor:
    """Numbers of ``data``, which are float16, as float32."""
    return data.contiguous().view(torch.float16).float()


def _signed(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.int8).to(torch.int16)


def _unsigned(data: torch.Tensor) -> torch.Tensor:
    return data.to(torch.int64)


def _look_up(table: tuple[int, ...], data: torch.Tensor, scales: torch.Tensor) -> Numbers:
    codes = _nibbles(data)
    return Numbers(torch.tensor(table, dtype=torch.int16)[codes.long()], scales, codes_NS=codes)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 groups of Q4_K and Q5_K.

    They take 12 bytes. Bytes 0 to 3 have scales 0 to 3 in their lower 6 bits, bytes 4 to 7 minima 0 to 3. Bytes 8 to 11 have the
    lower 4 bits of scales 4 to 7 (low halves) and of minima 4 to 7 (high halves); the upper 2 bits of these are in the upper 2 bits
    of bytes 0 to 7.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, last & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, last >> 4 | second >> 2 & 48), dim=1)
    return _half(blocks[:, :2]) * scales.float(), -(_half(blocks[:, 2:4]) * minima.float())
