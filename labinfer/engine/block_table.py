"""``BlockTable``: a sequence's blocks in a group of layers; ``SequenceCache``: its block tables, state slots and digests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from labinfer.base.plan import MoveKind
from labinfer.engine.block_manager import BlockManager


class BlockGroup(NamedTuple):
    """KV-block pools (device and host) of layers that cache equal tokens, such as all sliding-window layers, and kinds of ``CacheMove``."""

    blocks: BlockManager
    """The pool that attention reads."""
    host: BlockManager
    """Host-memory pool for swapped-out sequences."""
    copy: MoveKind = "copy"
    swap_out: MoveKind = "swap_out"
    swap_in: MoveKind = "swap_in"


@dataclass(eq=False, kw_only=True)
class BlockTable:
    """Blocks of a sequence in one ``BlockGroup``, in the order of the tokens."""

    blocks: list[int] = field(default_factory=list)
    num_freed: int = 0
    """Number of leading ``blocks`` that were freed (out of the window). Attention does not read these entries."""
    num_known: int = 0
    """Number of leading ``blocks`` that plans have sent to the workers."""
    host_blocks: list[int] = field(default_factory=list)
    """Blocks in the host pool, while the sequence is swapped out."""

    @property
    def in_use(self) -> list[int]:
        """Blocks that the sequence references."""
        return self.blocks[self.num_freed :] if self.num_freed else self.blocks

    def num_missing(self, pool: BlockManager, num_tokens: int, count: int) -> int:
        """Number of blocks to allocate before ``count`` tokens are written after the first ``num_tokens``. Includes one
        for copy-on-write if the last block is partial and shared."""
        missing, partial = pool.blocks_for(num_tokens + count) - len(self.blocks), pool.partial_block(num_tokens)
        return max(0, missing) + (partial is not None and pool.is_shared(self.blocks[partial]))

    def reserve(self, pool: BlockManager, num_tokens: int, num_missing: int) -> tuple[int, int] | None:
        """Allocate ``num_missing`` blocks, which must be free. Returns the source and destination of a copy-on-write, if one is needed."""
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
        """Free the blocks after the first ``num_tokens`` tokens."""
        kept = pool.blocks_for(num_tokens)
        pool.free(self.blocks[kept:])
        del self.blocks[kept:]
        self.num_known = min(self.num_known, kept)

    def release(self, group: BlockGroup) -> None:
        """Free all blocks, in the device and host pool."""
        group.blocks.free(self.in_use)
        group.host.free(self.host_blocks)
        self.blocks, self.host_blocks = [], []
        self.num_freed = self.num_known = 0

    def copies_for_shift(self, pool: BlockManager, begin: int, end: int, num_tokens: int) -> int:
        """Number of free blocks that ``shift`` with the same arguments needs: copies of shared blocks, minus the removed blocks."""
        first, last, filled = pool.full_blocks(begin), pool.full_blocks(end), pool.blocks_for(num_tokens)
        freed = sum(not pool.is_shared(block) for block in self.blocks[max(first, self.num_freed) : last])
        return sum(map(pool.is_shared, self.blocks[max(last, self.num_freed) : filled])) - freed

    def shift(self, pool: BlockManager, begin: int, end: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Remove the blocks of the tokens at positions ``begin`` to ``end`` (exclusive) from a table of ``num_tokens``.

        Returns the blocks after ``end``, and their destinations: the block itself, or a new block if it is shared.
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
    """Block tables and cache bookkeeping of one sequence. The object itself is the table of the full-attention layers,
    or of all layers if sliding-window layers have no separate blocks."""

    salt: str = ""
    """Prefix-cache salt: only sequences with equal salts share cached blocks."""
    num_tokens: int = 0
    """Tokens in the KV cache or scheduled to be written there; also the position of the next token."""
    num_dropped: int = 0
    """Number of the sequence's tokens that context shifts removed from the KV cache."""
    windowed: BlockTable = field(default_factory=BlockTable)
    """Block table of the sliding-window layers, if they have separate blocks; see ``WindowedBlocks``."""
    keeps_windows: bool = False
    """Whether ``windowed`` keeps all its blocks until the sequence ends, as context shifts move tokens back into the window."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the sequence's leading full blocks, computed on demand; see ``BlockManager.extend_chain``."""
    num_registered: int = 0
    """Number of leading blocks that are registered in the prefix cache."""
    state_slot: int | None = None
    """Slot of the sequence's recurrent state, if layers keep one; see ``state_slots.StateSlots``."""
    host_state_slot: int | None = None
    """Slot of the recurrent state in the host pool, while the sequence is swapped out."""
    last_snapshot: int = 0
    """Number of tokens in the sequence's full blocks at admission, its last token excluded. Once these tokens have run, a
    snapshot of the recurrent state is taken."""
    saved_slot: int | None = None
    """Slot with a saved copy of the recurrent state, to roll back to if drafted tokens are rejected."""
    num_saved: int = 0
    """Number of tokens that the saved state covers."""
    num_again: int = 0
    """Number of valid tokens after the saved state, to run again because the state was rolled back."""
