"""Blocks of memory that captured steps compute in, reused as soon as nothing refers to them."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from dataclasses import dataclass
from operator import attrgetter

import torch

from labinfer.functions.graph import SHARED_BYTES

MIN_BLOCK_BYTES = 4096
"""Bytes of a block, at least."""
SIZE = attrgetter("size")


@dataclass(eq=False)
class Block:
    """Memory for one tensor at a time."""

    data: torch.Tensor
    array_type: type[ctypes.Array]
    """Type of all of it; kept, as making one is slow."""
    first_step: int
    """Number of the step for which it was allocated."""
    step: int
    """Number of the step that it was last given to; 0 while it is free."""
    is_own: bool = False
    """Whether it is none of these blocks any more, but a step's own."""

    @property
    def size(self) -> int:
        return len(self.data)


class StepMemory:
    """Blocks for tensors of captured steps, of which one runs at a time.

    A tensor has a block for as long as something refers to its numbers, also through views. Once it is free, other parts of the step
    compute in it, and other steps.
    """

    def __init__(self):
        self._free: list[Block] = []  # the smallest first
        self._returned: list[Block] = []  # free, too: a finalizer may run in the midst of anything
        self._blocks: dict[int, Block] = {}  # by address
        self._step = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in self._blocks.values())

    def begin_step(self) -> None:
        """Blocks are for another step from now on."""
        self._step += 1

    def held_bytes(self) -> int:
        """Bytes of this step's blocks that something refers to."""
        return sum(block.size for block in self._blocks.values() if block.step == self._step)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor of the shape and dtype of one on the CPU that is contiguous and not empty, or None where there is no room; its
        numbers are not defined."""
        while self._returned:
            bisect.insort(self._free, self._returned.pop(), key=SIZE)
        index = bisect.bisect_left(self._free, tensor.nbytes, key=SIZE)
        if index < len(self._free):
            block = self._free.pop(index)
        elif (block := self._allocate(_block_size(tensor.nbytes))) is None:
            return None
        block.step = self._step
        # torch holds the array for as long as any tensor has its memory.
        array = block.array_type.from_address(block.data.data_ptr())
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.frombuffer(array, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the same place, which does not keep its block from being given to others; itself if it has none."""
        block = self._find_block(tensor)
        if block is None:
            return tensor
        numbers = torch.frombuffer(block.array_type.from_address(block.data.data_ptr()), dtype=tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The memory of this step's tensor, which no step after it will have; None if one before it had it, too."""
        block = self._find_block(tensor)
        if block is None:
            return tensor
        if block.first_step != self._step:
            return None
        del self._blocks[block.data.data_ptr()]
        block.is_own = True
        return block.data

    def _allocate(self, size: int) -> Block | None:
        if self.num_bytes + size > SHARED_BYTES:
            return None
        data = torch.empty(size, dtype=torch.uint8)
        block = self._blocks[data.data_ptr()] = Block(data, ctypes.c_char * size, self._step, self._step)
        return block

    def _give_back(self, block: Block) -> None:
        block.step = 0
        if not block.is_own:
            self._returned.append(block)

    def _find_block(self, tensor: torch.Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage().data_ptr())


def _block_size(num_bytes: int) -> int:
    """A power of two or one and a half times as much, so that steps on batches of like sizes find blocks of each other's."""
    power = max(MIN_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
    return 3 * power // 4 if MIN_BLOCK_BYTES <= num_bytes <= 3 * power // 4 else power
