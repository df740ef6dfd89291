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
from labinfer.weights.gguf.grids import IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
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


def _q2_k(blocks: torch.Tensor) -> Numbers:
    scales, minima = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    return Numbers(_pairs(blocks[:, 16:80]), _half(blocks[:, 80:82]) * scales, -(_half(blocks[:, 82:]) * minima))


def _q3_k(blocks: torch.Tensor) -> Numbers:
    """The 16 scales have 6 bits: the lower 4 in the halves of bytes 96 to 103, the upper 2 in those of bytes 104 to 107."""
    high = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8).unsqueeze(1) & 1).flatten(1).to(torch.int16)
    upper = (blocks[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1) & 3).flatten(1)
    scales = (_nibbles(blocks[:, 96:104], run=8) | upper.to(torch.int16) << 4) - 32
    return Numbers((_pairs(blocks[:, 32:96]) | high << 2) - 4, _half(blocks[:, 108:]) * scales.float())


def _iq1_s(blocks: torch.Tensor) -> Numbers:
    """The numbers of the grid are shifted by an eighth, up or down, so eight times a number is an integer."""
    rest = _words(blocks[:, 34:], torch.int16)
    indices = _unsigned(blocks[:, 2:34]).view(-1, 8, 4) | (rest.unsqueeze(2) >> torch.tensor([0, 3, 6, 9]) & 7) << 8
    whole = 8 * IQ1.vectors[indices].flatten(2) + (1 - 2 * (rest >> 15)).unsqueeze(2)
    return Numbers(whole.flatten(1).to(torch.int16), _half(blocks[:, :2]) * (2 * (rest >> 12 & 7) + 1).float() / 8)


def _iq1_m(blocks: torch.Tensor) -> Numbers:
    """The bits of the float16 scale are the upper halves of the last bytes of four words."""
    words = _words(blocks[:, 48:], torch.int16)
    bits = (words >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    scale = bits.to(torch.uint16).view(torch.float16).float()
    scales = 2 * (words.unsqueeze(2) >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1) + 1
    rest = _nibbles(blocks[:, 32:48], run=1).long()
    vectors = IQ1.vectors[_unsigned(blocks[:, :32]) | (rest & 7) << 8]
    whole = 8 * vectors + (1 - 2 * (rest >> 3)).unsqueeze(2)
    return Numbers(whole.flatten(1).to(torch.int16), scale * scales.float() / 8)


def _iq2_xxs(blocks: torch.Tensor) -> Numbers:
    words = _words(blocks[:, 2:], torch.int32).view(-1, 8, 2)[:, :, 1]
    vectors = IQ2_XXS.vectors[_unsigned(blocks[:, 2:]).view(-1, 8, 8)[:, :, :4]]
    return _signed_vectors(
        vectors.flatten(1), _even_signs(words), _half(blocks[:, :2]) * (0.5 + (words >> 28).float()) / 4
    )


def _iq2_xs(blocks: torch.Tensor) -> Numbers:
    words, scales = _words(blocks[:, 2:66], torch.int16), 0.5 + _nibbles(blocks[:, 66:], run=1).float()
    vectors = IQ2_XS.vectors[words & 511]
    return _signed_vectors(vectors.flatten(1), _parity(words >> 9), _half(blocks[:, :2]) * scales / 4)


def _iq2_s(blocks: torch.Tensor) -> Numbers:
    upper = _unsigned(blocks[:, 66:74]).unsqueeze(2) >> torch.tensor([0, 2, 4, 6]) & 3
    vectors = IQ2_S.vectors[_unsigned(blocks[:, 2:34]) | upper.flatten(1) << 8]
    scales = 0.5 + _nibbles(blocks[:, 74:], run=1).float()
    return _signed_vectors(vectors.flatten(1), _unsigned(blocks[:, 34:66]), _half(blocks[:, :2]) * scales / 4)


def _iq3_xxs(blocks: torch.Tensor) -> Numbers:
    words, vectors = _words(blocks[:, 66:], torch.int32), IQ3_XXS.vectors[_unsigned(blocks[:, 2:66])]
    return _signed_vectors(
        vectors.flatten(1), _even_signs(words), _half(blocks[:, :2]) * (0.5 + (words >> 28).float()) / 2
    )


def _iq3_s(blocks: torch.Tensor) -> Numbers:
    vectors = IQ3_S.vectors[_unsigned(blocks[:, 2:66]) | _bits(blocks[:, 66:74]).long() << 8]
    scales = 1 + 2 * _nibbles(blocks[:, 106:], run=1).float()
    return _signed_vectors(vectors.flatten(1), _unsigned(blocks[:, 74:106]), _half(blocks[:, :2]) * scales)


def _tq1_0(blocks: torch.Tensor) -> Numbers:
    """A byte has five ternary digits (bytes 48 to 51: four) of numbers that are a byte's length apart; digit k is the upper byte of 3
    times the lower byte of the stored one times 3 ** k."""
    powers = torch.tensor([1, 3, 9, 27, 81]).unsqueeze(1)
    parts = (blocks[:, None, :32], powers), (blocks[:, None, 32:48], powers), (blocks[:, None, 48:52], powers[:4])
    digits = torch.cat([((part.long() * powers & 255) * 3 >> 8).flatten(1) for part, powers in parts], dim=1)
    return Numbers((digits - 1).to(torch.int16), _half(blocks[:, 52:]).repeat(1, 2))


def _tq2_0(blocks: torch.Tensor) -> Numbers:
    return Numbers(_pairs(blocks[:, :64]) - 1, _half(blocks[:, 64:]).repeat(1, 2))


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
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _nibbles(data: torch.Tensor, run: int = 16) -> torch.Tensor:
    """Codes of 4 bits as int16: from each ``run`` bytes of ``data``, first the low halves of all bytes, then the high halves."""
    runs = data.reshape(len(data), -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), dim=2).view(len(data), -1).to(torch.int16)


def _pairs(data: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits as int16: from each 32 bytes of ``data``, first the lowest 2 bits of all bytes, then the next ones."""
    runs = data.reshape(len(data), -1, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
    return (runs & 3).flatten(1).to(torch.int16)


def _words(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unsigned integers of ``data``, of as many bits as ``dtype`` has, as int64."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype).long() & (1 << 8 * dtype.itemsize) - 1


def _parity(seven: torch.Tensor) -> torch.Tensor:
    """Bytes of an even number of ones, from their lower 7 bits ``seven`` (int64)."""
    ones = sum(seven >> bit & 1 for bit in range(7))
    return seven | (ones & 1) << 7


def _even_signs(words: torch.Tensor) -> torch.Tensor:
    """Bytes of signs, from the lower 28 bits of 32-bit words: four times 7 bits; see ``_parity``."""
    return _parity(words.unsqueeze(2) >> torch.tensor([0, 7, 14, 21]) & 127).flatten(1)


def _signed_vectors(magnitudes_NS: torch.Tensor, signs: torch.Tensor, scales_NG: torch.Tensor) -> Numbers:
    """Numbers with a sign each; a bit of the bytes ``signs`` (N, S / 8) is 1 for a negative number, the lowest bit first."""
    return Numbers(magnitudes_NS * (1 - 2 * _bits(signs.to(torch.uint8))), scales_NG)


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
