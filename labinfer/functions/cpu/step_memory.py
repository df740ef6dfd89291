"""Memory of what captured steps compute: what one needs no longer is the next one's."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from dataclasses import dataclass

import torch

SMALLEST = 4096
"""Bytes of a block, at least."""


@dataclass(frozen=True, eq=False)
class Block:
    """Memory for one tensor at a time."""

    data: torch.Tensor
    kind: type[ctypes.Array]
    """All of it as an array: to make a type takes longer than all else."""


class StepMemory:
    """Blocks of memory for tensors of captured steps, of which one runs at a time.

    A tensor has a block for as long as something refers to its numbers, be it another view of them. What a step computes
    for itself alone so stands where other parts of it do, and other steps; what is left of it at its end, its result, stands alone.
    """

    def __init__(self):
        self._blocks: list[Block] = []
        self._free: list[Block] = []  # the smallest first

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(map(_size, self._blocks))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype of one on the CPU that is contiguous and not empty; its numbers are not defined."""
        index = bisect.bisect_left(self._free, tensor.nbytes, key=_size)
        if index == len(self._free):
            size = _block_size(tensor.nbytes)
            block = Block(torch.empty(size, dtype=torch.uint8), ctypes.c_char * size)
            self._blocks.append(block)
        else:
            block = self._free.pop(index)
        # torch holds the array for as long as any tensor has its memory.
        array = block.kind.from_address(block.data.data_ptr())
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.frombuffer(array, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)

    def _give_back(self, block: Block) -> None:
        bisect.insort(self._free, block, key=_size)


def _size(block: Block) -> int:
    return ctypes.sizeof(block.kind)


def _block_size(num_bytes: int) -> int:
    """A power of two or one and a half times as much, so that steps on batches of like sizes find blocks of each other's."""
    power = max(SMALLEST, 1 << (num_bytes - 1).bit_length())
    return 3 * power // 4 if SMALLEST <= num_bytes <= 3 * power // 4 else power
