"""Who owns which KV block. The blocks themselves live on the workers."""

from __future__ import annotations

from collections.abc import Iterable


class BlockManager:
    """A pool of equal blocks, handed out and taken back.

    Args:
        num_blocks: blocks on every rank.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        # A stack: what was used last is used next, so that memory the run does not need is never touched.
        self._free = list(reversed(range(num_blocks)))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use."""
        return len(self._used) / self.num_blocks if self.num_blocks else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, or None where there is no room."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._used.remove(block)  # KeyError: freed twice
            self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is free or used, and none is both."""
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert not self._used & set(self._free), "a block is both free and used"
        assert len(self._free) + len(self._used) == self.num_blocks, "a block is lost"
