"""``BlockTable``: a sequence's blocks of one group of layers; ``SequenceCache``: all that it has in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from labinfer.base.plan import MoveKind
from labinfer.engine.block_manager import BlockManager


class BlockGroup(NamedTuple):
    """Pools of blocks for layers that hold the same tokens, and the kinds of moves in and between these pools."""

    blocks: BlockManager
    """The pool that attention reads."""
    host: BlockManager
    """The pool in host memory that sequences are swapped out to."""
    copy: MoveKind = "copy"
    swap_out: MoveKind = "swap_out"
    swap_in: MoveKind = "swap_in"


@dataclass(eq=False, kw_only=True)
class BlockTable:
    """Blocks of a sequence in the order of its tokens."""

    blocks: list[int] = field(default_factory=list)
    num_freed: int = 0
    """Number of ``blocks``, the first ones, that are not the sequence's any more: nothing reads them."""
    num_known: int = 0
    """Number of ``blocks`` that the workers know."""
    host_blocks: list[int] = field(default_factory=list)
    """Blocks of the host pool, while the sequence is swapped out."""

    @property
    def in_use(self) -> list[int]:
        """Blocks that the sequence holds."""
        return self.blocks[self.num_freed :] if self.num_freed else self.blocks

    def num_missing(self, pool: BlockManager, num_tokens: int, count: int) -> int:
        """Blocks to be allocated before ``count`` tokens are written behind the first ``num_tokens``: new ones, and one for a copy
        of the last one if it has begun and is shared."""
        missing, partial = pool.blocks_for(num_tokens + count) - len(self.blocks), pool.partial_block(num_tokens)
        return max(0, missing) + (partial is not None and pool.is_shared(self.blocks[partial]))

    def reserve(self, pool: BlockManager, num_tokens: int, num_missing: int) -> tuple[int, int] | None:
        """Allocate what ``num_missing`` has counted, which must be free; returns a block to copy and its copy, if one is shared."""
        partial = pool.partial_block(num_tokens)
        copied = partial is not None and num_missing > 0 and pool.is_shared(self.blocks[partial])
        if partial is not None and not copied:
            pool.unregister(self.blocks[partial])
        if not num_missing:
            return None
        new, source = pool.allocate(num_missing), self.blocks[partial] if copied else None
        if copied:
            pool.free([source])
            self.blocks[partial] = new.pop(0)
            self.num_known = min(self.num_known, partial)
        self.blocks += new
        return (source, self.blocks[partial]) if copied else None

    def truncate(self, pool: BlockManager, num_tokens: int) -> None:
        """Free what is behind the first ``num_tokens`` tokens."""
        kept = pool.blocks_for(num_tokens)
        pool.free(self.blocks[kept:])
        del self.blocks[kept:]
        self.num_known = min(self.num_known, kept)

    def release(self, group: BlockGroup) -> None:
        """Free all blocks, in both pools."""
        group.blocks.free(self.in_use)
        group.host.free(self.host_blocks)
        self.blocks, self.host_blocks = [], []
        self.num_freed = self.num_known = 0

    def copies_for_shift(self, pool: BlockManager, begin: int, end: int, num_tokens: int) -> int:
        """Blocks that must be free for ``shift`` beside those that it frees, with the same arguments."""
        first, last, filled = pool.full_blocks(begin), pool.full_blocks(end), pool.blocks_for(num_tokens)
        freed = sum(not pool.is_shared(block) for block in self.blocks[max(first, self.num_freed) : last])
        return sum(map(pool.is_shared, self.blocks[max(last, self.num_freed) : filled])) - freed

    def shift(self, pool: BlockManager, begin: int, end: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Take the blocks of tokens at positions ``begin`` up to ``end`` out of those of ``num_tokens``.

        Returns the blocks behind them, and as many in their places: the same, but for a copy of each that is shared.
        """
        first, last, filled = pool.full_blocks(begin), pool.full_blocks(end), pool.blocks_for(num_tokens)
        behind = max(last, self.num_freed)
        removed, moved = self.blocks[max(first, self.num_freed) : last], self.blocks[behind:filled]
        shared = [block for block in moved if pool.is_shared(block)]
        pool.free(removed)
        copies = dict(zip(shared, pool.allocate(len(shared)), strict=True))
        pool.free(shared)
        for block in moved:
            if block not in copies:
                pool.unregister(block)
        dest = [copies.get(block, block) for block in moved]
        self.blocks = [*self.blocks[:first], *self.blocks[last:behind], *dest, *self.blocks[filled:]]
        if self.num_freed:
            self.num_freed -= last - first
        self.num_known = min(self.num_known, first)
        return moved, dest


@dataclass(eq=False, kw_only=True)
class SequenceCache(BlockTable):
    """Places of the keys and values of one sequence. It is itself the table of the layers that see all tokens, and of all layers
    where those with a window have no blocks of their own."""

    salt: str = ""
    """Only sequences with the same salt find each other's blocks."""
    num_tokens: int = 0
    """Tokens whose keys and values are there or on their way; also the position of the next one."""
    num_dropped: int = 0
    """Tokens that were shifted out of the context."""
    windowed: BlockTable = field(default_factory=BlockTable)
    """Table of the windowed layers, where they have blocks of their own; see ``WindowedBlocks``."""
    keeps_windows: bool = False
    """Whether no block of that table is freed before the sequence is done."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of its first full blocks, as far as they were needed; see ``BlockManager.extend_chain``."""
    num_registered: int = 0
    """Blocks that others can find."""
    state_slot: int | None = None
    """Slot of its state, with layers that keep one; see ``state_slots.StateSlots``."""
    host_state_slot: int | None = None
    """Slot of its state in the host pool, while it is swapped out."""
    last_snapshot: int = 0
    """Tokens before the last block end of those it was admitted with: a snapshot is taken there."""
    saved_slot: int | None = None
    """Slot with a copy of its state, to which it can go back."""
    num_saved: int = 0
    """Tokens that are in that state."""
    num_again: int = 0
    """Tokens that it went back by and that are right: they are run again."""
