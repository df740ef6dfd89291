"""Reference-counted blocks of memory for the tensors of captured steps."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from dataclasses import dataclass
from operator import attrgetter

import torch

from labinfer.functions.graph import SHARED_BYTES

MIN_BLOCK_BYTES = 4096
"""Minimum block size in bytes."""
SIZE = attrgetter("size")


@dataclass(eq=False)
class Block:
    """Memory for one tensor at a time."""

    data: torch.Tensor
    array_type: type[ctypes.Array]
    """ctypes array type of the block's size; kept, as creating one is slow."""
    first_step: int
    """Number of the step that allocated the block."""
    step: int
    """Number of the step that last used the block; 0 while it is free."""
    is_own: bool = False
    """Whether the block has left the pool and belongs to one step."""

    @property
    def size(self) -> int:
        return len(self.data)


class StepMemory:
    """Pool of blocks for the tensors of captured steps; only one captured step runs at a time.

    A tensor holds its block as long as anything refers to its storage, views included. A free block is reused within the step and by
    other steps.
    """

    def __init__(self):
        self._free: list[Block] = []  # free blocks, the smallest first
        self._returned: list[Block] = []  # free blocks, not yet sorted: a finalizer may run at any point of the code
        self._blocks: dict[int, Block] = {}  # address → block
        self._step = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in self._blocks.values())

    def begin_step(self) -> None:
        """Start the next step; blocks handed out from now on belong to it."""
        self._step += 1

    def held_bytes(self) -> int:
        """Bytes of this step's blocks that are still referenced."""
        return sum(block.size for block in self._blocks.values() if block.step == self._step)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """An uninitialised tensor with the shape and dtype of ``tensor``, or None if the pool is full.

        Args:
            tensor: contiguous, not empty, on the CPU.
        """
        while self._returned:
            bisect.insort(self._free, self._returned.pop(), key=SIZE)
        index = bisect.bisect_left(self._free, tensor.nbytes, key=SIZE)
        if index < len(self._free):
            block = self._free.pop(index)
        elif (block := self._allocate(_block_size(tensor.nbytes))) is None:
            return None
        block.step = self._step
        # torch keeps the array alive as long as any tensor uses its memory.
        array = block.array_type.from_address(block.data.data_ptr())
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.frombuffer(array, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of ``tensor`` that does not keep its ``Block`` in use, so the block may be reused while the view exists.

        Returns ``tensor`` itself if its memory is not from this pool.
        """
        block = self._find_block(tensor)
        if block is None:
            return tensor
        numbers = torch.frombuffer(block.array_type.from_address(block.data.data_ptr()), dtype=tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Take the block of this step's tensor out of the pool and return its memory (``tensor`` itself if it has no block); None if an earlier step
        allocated the block."""
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
    """Smallest power of two, or 3/4 of one, that fits: steps on batches of similar sizes can reuse each other's blocks."""
    power = max(MIN_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
    return 3 * power // 4 if MIN_BLOCK_BYTES <= num_bytes <= 3 * power // 4 else power
