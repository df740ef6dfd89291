"""Eviction: which unreferenced block of the prefix cache is evicted next. LRU ships."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Eviction:
    """Order in which the unreferenced blocks of a prefix cache are evicted.

    Each pool makes an object of its own, without arguments, on the rank that allocates its blocks: rank 0 for KV blocks, window
    blocks and state slots (whose snapshots are blocks here), and the rank of a draft model for the draft model's. The calls depend
    only on the schedule, never on times, so a policy without random numbers evicts equal blocks in every run.

    A block is *evictable* while it holds cached tokens and no sequence references it. ``BlockManager`` calls the methods between
    two micro-batches, so they must be fast: with a full cache ``add`` and ``evict`` run once for every block that is allocated.
    """

    def add(self, blocks: Sequence[int]) -> None:
        """Note that ``blocks`` are evictable from now on. Blocks of one sequence come in reverse order: a policy that
        keeps this order evicts a continuation before its prefix."""
        raise NotImplementedError

    def use(self, blocks: Sequence[int]) -> None:
        """Note a cache hit: a sequence references ``blocks``, which are no longer evictable. Also called if a preempted
        sequence reuses its own blocks."""
        raise NotImplementedError

    def evict(self) -> int:
        """Choose an evictable block and forget it: its tokens are no longer cached. Called only while at least one block is evictable.
        ``BlockManager`` asserts that the chosen block is."""
        raise NotImplementedError

    def forget(self, block: int) -> None:
        """Note that the tokens of ``block``, which is not evictable, are no longer cached: the sequence that references the block overwrites them."""


class LRU(Eviction):
    """Least recently used first: evicts the block whose last reference was released the longest ago."""

    def __init__(self) -> None:
        # Not a dict, which takes longer to find its first key the more keys were removed.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks[block] = None

    def use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)

    def evict(self) -> int:
        return self._blocks.popitem(last=False)[0]
