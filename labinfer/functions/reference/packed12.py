"""bfloat16 weights losslessly compressed to 12 bits: plain torch that defines what compiled functions compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.functions.packed_weight import DenseWeight, clone_tensors
from labinfer.functions.reference import linear as plain

NUMBERS = 8
"""Distinct upper bytes (without the sign bit) that a 3-bit code can represent."""
PATCH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Packed12Weight:
    """Lower byte of each weight, a 4-bit code for its upper byte, and the weights whose upper byte has no code."""

    lower_OI: torch.Tensor
    codes_N: torch.Tensor
    """Two codes per byte, all outputs one after another. A code is a sign bit above three bits that are added to ``base``."""
    base: int
    places_M: torch.Tensor
    """Flat indices of the weights without a code, int64."""
    patches_M: torch.Tensor

    @property
    def outputs(self) -> int:
        return self.lower_OI.shape[0]

    @property
    def inputs(self) -> int:
        return self.lower_OI.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def exact_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.lower_OI.device

    @property
    def nbytes(self) -> int:
        """Bytes in a kernel's packed format. On the meta device, patches (weights whose upper byte has no 4-bit code) are not
        counted: their number is unknown there."""
        return self.lower_OI.nbytes + self.codes_N.nbytes + PATCH_BYTES * len(self.places_M)

    def clone(self) -> Packed12Weight:
        return clone_tensors(self)


def pack_weight(weight_OI: torch.Tensor) -> Packed12Weight:
    """Compress a bfloat16 matrix to 12 bits a weight."""
    outputs, inputs = weight_OI.shape
    if weight_OI.is_meta:
        lower_OI, codes_N = (
            weight_OI.new_empty(size, dtype=torch.uint8) for size in ((outputs, inputs), _half(weight_OI))
        )
        return Packed12Weight(lower_OI, codes_N, 0, weight_OI.new_empty(0, dtype=torch.int64), weight_OI.new_empty(0))
    bits_N = weight_OI.contiguous().view(torch.int16).flatten().int()
    upper_N = bits_N >> 8 & 0x7F
    numbers = torch.bincount(upper_N, minlength=128).unfold(0, NUMBERS, 1).sum(dim=1)
    base = int(numbers.argmax())
    is_held_N = (upper_N >= base) & (upper_N < base + NUMBERS)
    codes_N = torch.zeros(2 * _half(weight_OI), dtype=torch.uint8, device=weight_OI.device)
    codes_N[: len(bits_N)] = (bits_N >> 12 & 8) | (upper_N - base & 7)
    places_M = (~is_held_N).nonzero().squeeze(1)
    return Packed12Weight(
        (bits_N & 0xFF).to(torch.uint8).view(outputs, inputs),
        codes_N[::2] | codes_N[1::2] << 4,
        base,
        places_M,
        weight_OI.flatten()[places_M],
    )


def unpack_weight(weight: Packed12Weight) -> torch.Tensor:
    """Decompress to (O, I) bfloat16, bit-exact."""
    codes_N = torch.stack((weight.codes_N & 15, weight.codes_N >> 4), dim=1).flatten()[: weight.lower_OI.numel()].int()
    upper_N = (codes_N & 8) << 4 | (codes_N & 7) + weight.base
    bits_N = (upper_N << 8 | weight.lower_OI.flatten()).to(torch.int16)
    values_N = bits_N.view(torch.bfloat16)
    values_N[weight.places_M] = weight.patches_M
    return values_N.view(weight.outputs, weight.inputs)


def linear(x_TI: torch.Tensor, weight: Packed12Weight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """``plain.linear`` with the decompressed weight."""
    return plain.linear(x_TI, _dense(weight), bias_O)


def embedding(token_ids_T: torch.Tensor, table: Packed12Weight, first: int) -> torch.Tensor:
    """``plain.embedding`` with the decompressed table."""
    return plain.embedding(token_ids_T, _dense(table), first)


def _dense(weight: Packed12Weight) -> DenseWeight:
    return DenseWeight(unpack_weight(weight), weight.outputs, weight.inputs)


def _half(weight_OI: torch.Tensor) -> int:
    return -(-weight_OI.numel() // 2)
