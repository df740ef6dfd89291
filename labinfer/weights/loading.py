"""LoadFunctions: inner loops of weight loading, which a provider may replace by compiled ones.

Letters of shapes: O outputs, I inputs, G groups of inputs (a scale each), B bytes, W words of 32 bits. All tensors are in host
memory. Rows may have gaps between them.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from labinfer.weights.codes import row_chunks, unpack

LARGEST_FLOAT8 = 448.0
"""Largest finite e4m3 number. The next larger bit pattern, which would be 480, is NaN."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the output (of eight) to which each 4-bit code of an AWQ word belongs, from the lowest bits up."""


class LoadFunctions:
    """Inner loops of weight loading in torch, for machines without a compiler. Providers' subclasses give bitwise equal results."""

    def read_rows(self, file: int, position: int, stride: int, rows_RB: torch.Tensor) -> bool:
        """Read bytes of a file into ``rows_RB`` (uint8). Returns False if the file ends too early or cannot be read.

        Args:
            file: file descriptor.
            position, stride: byte offset of the first row, and bytes from one row to the next.
        """
        if rows_RB.is_contiguous() and stride == rows_RB.shape[1]:
            rows_RB = rows_RB.view(1, -1)
        for row in rows_RB.numpy():
            target, begin = memoryview(row), position
            while target.nbytes:
                try:
                    count = os.preadv(file, [target], begin)  # a system call reads at most 2 GiB
                except OSError:
                    return False
                if not count:
                    return False
                begin, target = begin + count, target[count:]
            position += stride
        return True

    def transpose_words(self, words_WO: torch.Tensor, out_OW: torch.Tensor) -> None:
        """Transpose words of codes along the inputs: (W, O) int32 → (O, W)."""
        out_OW[:, : len(words_WO)].copy_(words_WO.T)

    def transpose_awq(self, words_IC: torch.Tensor, out_OW: torch.Tensor) -> None:
        """Transpose AWQ's words of 4 bits from along the outputs to along the inputs: (I, C) int32 → (8 C, I / 8 rounded up).

        Codes after the last input are zeros.

        Eight inputs of a column of words are a square of 8 × 8 codes, which is transposed by exchanging halves, quarters and single codes
        (Warren, Hacker's Delight, 7-3): one pass over words instead of one over codes.
        """
        inputs, columns = words_IC.shape
        for begin, end in row_chunks(0, -(-inputs // 8), columns * 8):
            squares = words_IC.new_zeros(end - begin, 8, columns)
            rows = words_IC[begin * 8 : end * 8]
            squares.view(-1, columns)[: len(rows)] = rows
            for size, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
                halves = squares.view(end - begin, 8 // (2 * size), 2, size, columns)
                low, high = halves[:, :, 0], halves[:, :, 1]
                changed = ((low >> 4 * size) ^ high) & mask
                high ^= changed
                low ^= changed << 4 * size
            for place, output in enumerate(AWQ_ORDER):
                out_OW[output::8, begin:end] = squares[:, place].T

    def decode(
        self,
        stored_OB: torch.Tensor,
        scales_OG: torch.Tensor,
        zeros_OG: torch.Tensor | None,
        out_OI: torch.Tensor,
        *,
        bits: int,
        group: int,
        lead: int,
        skip: int = 0,
        is_float: bool = False,
        order_I: torch.Tensor | None = None,
    ) -> None:
        """Dequantize: ``(number - zero) * scale``, rounded once to the dtype of ``out_OI`` (float32 or bfloat16).

        Args:
            stored_OB: uint8; two 4-bit values are in a byte, the first in the low half.
            scales_OG: float32.
            zeros_OG: uint8, with the strides of the scales; None for ``2 ** (bits - 1)``, or for 0 with ``is_float``.
            group: group size (inputs that share a scale); 0 for all inputs.
            lead: number of inputs of the first group that precede ``out_OI``.
            skip: number of values in ``stored_OB`` that precede ``out_OI``.
            is_float: whether the values are e4m3.
            order_I: int32, group index of each input, which replaces ``group`` and ``lead``; None for consecutive groups.
        """
        columns = out_OI.shape[1]
        order_I = (torch.arange(columns) + lead) // (group or lead + columns) if order_I is None else order_I.long()
        for begin, end in row_chunks(0, *out_OI.shape):
            stored = stored_OB[begin:end]
            values = _widen_float8(stored) if is_float else unpack(stored, bits).float()
            values = values[:, skip : skip + columns]
            if zeros_OG is not None:
                values -= zeros_OG[begin:end, order_I]
            elif not is_float:
                values -= 1 << (bits - 1)
            out_OI[begin:end].copy_(values.mul_(scales_OG[begin:end, order_I]))

    def round_groups(
        self, values_OI: torch.Tensor, codes_OB: torch.Tensor, scales_OG: torch.Tensor, *, group: int, lead: int
    ) -> None:
        """Quantize float32 to 8 bits by groups: the largest value of a group is 127 times the group's scale, or slightly less.

        Scales have 11 significant bits, as kernels keep no more. Values that are not finite give a scale that is not finite. Codes are
        uint8: integers plus 128.

        Args:
            group, lead: see ``decode``; the padding of the first and last group is zero.
        """
        for begin, end in row_chunks(0, *values_OI.shape):
            values = values_OI[begin:end]
            wide = F.pad(values, (lead, -(lead + values.shape[1]) % group)).view(end - begin, -1, group)
            bits = (wide.abs().amax(dim=2) / 127).view(torch.int32)
            scales = ((bits + 0x1FFF) & ~0x1FFF).view(torch.float32)
            factors = torch.where(scales > 0, 1 / scales, torch.zeros(()))
            whole = (wide * factors.unsqueeze(2)).round_().to(torch.int8).view(torch.uint8) ^ 128
            codes_OB[begin:end].copy_(whole.view(end - begin, -1))
            scales_OG[begin:end].copy_(scales)

    def checksum(self, bytes_B: torch.Tensor) -> int:
        """Sum of ``(word ^ word >> 32) * odd`` modulo 2 ** 64 over the 64-bit words, where ``odd`` is 1, 3, 5 and so on.

        Detects any change of one word and any two flipped bits.

        May be called from several threads at once.

        Args:
            bytes_B: data whose length is a multiple of 8.
        """
        words_W = bytes_B.view(torch.int64)
        odd_W = torch.arange(1, 2 * len(words_W), 2)
        mixed_W = words_W ^ (words_W >> 32 & 0xFFFFFFFF)
        return (mixed_W * odd_W).sum().item() % (1 << 64)


def _widen_float8(stored: torch.Tensor) -> torch.Tensor:
    """Convert e4m3 to float32, many times faster than torch does.

    The bits of an e4m3 number, shifted left by seven, are those of a float16 number that is smaller by 2 ** 8. Sign extension of
    the byte moves its sign to the sign bit.
    """
    halves = stored.view(torch.int8).to(torch.int16)
    halves <<= 7
    halves &= -0x4080  # 0xbf80: sign, 4 of the 5 exponent bits, and the fraction
    values = halves.view(torch.float16).float().mul_(256)
    return values.masked_fill_(values.abs() > LARGEST_FLOAT8, torch.nan)
