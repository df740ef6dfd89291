"""Memory of what captured steps compute: what one needs no longer is the next one's."""

from __future__ import annotations

import bisect
import ctypes
import weakref

import torch

SMALLEST = 4096
"""Bytes of a block, at least."""


class StepMemory:
    """Blocks of memory for tensors of captured steps, of which one runs at a time.

    A tensor has a block for as long as something refers to its numbers, be it another view of them. What a step computes
    for itself alone so stands where other parts of it do, and other steps; what is left of it at its end, its result, stands alone.
    """

    def __init__(self):
        self._blocks: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []  # the smallest first

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(map(len, self._blocks))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype of one on the CPU that is contiguous and not empty; its numbers are not defined."""
        index = bisect.bisect_left(self._free, tensor.nbytes, key=len)
        if index == len(self._free):
            self._free.append(torch.empty(_block_size(tensor.nbytes), dtype=torch.uint8))
            self._blocks.append(self._free[index])
        block = self._free.pop(index)
        # torch holds the array for as long as any tensor has its memory.
        array = (ctypes.c_char * tensor.nbytes).from_address(block.data_ptr())
        weakref.finalize(array, bisect.insort, self._free, block, key=len).atexit = False
        return torch.frombuffer(array, dtype=tensor.dtype).view(tensor.shape)


def _block_size(num_bytes: int) -> int:
    """A power of two or one and a half times as much, so that steps on batches of like sizes find blocks of each other's."""
    power = max(SMALLEST, 1 << (num_bytes - 1).bit_length())
    return 3 * power // 4 if SMALLEST <= num_bytes <= 3 * power // 4 else power
