"""``WindowedBlocks``: KV blocks of sliding-window layers, freed once they are out of the window."""

from __future__ import annotations

from collections.abc import Sequence

from labinfer.engine.block_manager import BlockManager
from labinfer.engine.block_table import BlockGroup, SequenceCache
from labinfer.engine.cache_capacity import SlidingWindow

NO_BLOCK = 0
"""Placeholder in tables for a block that the sequence never had; any valid block number."""


class WindowedBlocks:
    """Pools of window blocks, and the choice of which blocks sequences keep.

    A token attends to ``window`` tokens, itself included. Between two steps a sequence needs the blocks of its last
    ``window - 1`` tokens, and in a step also those of the step's tokens. A block table has entries for all tokens;
    leading entries are stale, which ``functions.protocols.PagedAttention`` allows. Freed blocks stay in the prefix
    cache until they are evicted.

    Args:
        window: largest window of any layer, in tokens.
        chunk: maximum number of tokens of a sequence in a step.
        blocks, host: device and host-memory pool, with the block size of the full-attention layers.
    """

    def __init__(self, window: int, chunk: int, blocks: BlockManager, host: BlockManager):
        self.group = BlockGroup(blocks, host, "copy_window", "swap_out_window", "swap_in_window")
        self.blocks, self._window, self._chunk = blocks, window, chunk
        self._held_between_steps = SlidingWindow(window, blocks.block_size).blocks_between_steps
        self._unseen: list[tuple[SequenceCache, int]] = []

    def fits_in(self, num_tokens: int) -> bool:
        """Whether the next token attends to no token before the last ``num_tokens``."""
        return num_tokens >= self._window - 1

    def first_seen(self, cache: SequenceCache, num_tokens: int) -> int:
        """Index of the first block that the token after the first ``num_tokens`` attends to."""
        return 0 if cache.keeps_windows else self.blocks.full_blocks(max(0, num_tokens - self._window + 1))

    def blocks_for_beams(self, num_beams: int, num_tokens: int, keeps_windows: bool) -> int:
        """Minimum number of blocks for ``num_beams`` beams of at most ``num_tokens`` tokens each."""
        each = self.blocks.blocks_for(num_tokens)
        if not keeps_windows:
            each = min(each, self._held_between_steps + 1)
        return num_beams * each + self.blocks.blocks_for(self._chunk)

    def find(self, cache: SequenceCache, digests: Sequence[bytes], num_own: int = 0) -> int:
        """Length of the longest prefix of ``digests`` after which a sequence can continue, because all blocks that its
        next token attends to are cached, or are among the sequence's own first ``num_own`` blocks."""
        num_known, longest = num_own, num_own
        for count, digest in enumerate(digests[num_own:], num_own + 1):
            num_known = num_known + 1 if self.blocks.find([digest]) else 0
            if num_known >= count - self.first_seen(cache, self.blocks.tokens_in(count)):
                longest = count
        return longest

    def has_room(self, cache: SequenceCache, digests: Sequence[bytes], num_tokens: int) -> bool:
        """Whether ``admit`` finds enough free blocks for these arguments, and leaves enough for the sequence's first
        chunk and for one new block of each running sequence, which allocates a block before it frees one."""
        first, shared = self._find_seen(cache, digests)
        length = self._length(cache, first, num_tokens)
        chunk = min(self.blocks.blocks_for(self._chunk), max(0, self.blocks.blocks_for(num_tokens) - length))
        idle = sum(not self.blocks.is_used(block) for block in shared)
        others = (self.blocks.num_blocks - self.blocks.num_free) // self._held_between_steps
        return length - first - len(shared) + chunk + others <= self.blocks.num_free - idle

    def admit(self, cache: SequenceCache, digests: Sequence[bytes], num_tokens: int) -> list[int]:
        """Allocate the blocks that a sequence of ``num_tokens`` tokens needs between two steps, so that it grows no
        more than running ones. Shares cached blocks of ``digests``, which ``find`` has truncated. Returns the
        destination blocks of a swap-in."""
        table = cache.windowed
        first, shared = self._find_seen(cache, digests)
        blocks = self.blocks.acquire(shared, self._length(cache, first, num_tokens) - first - len(shared))
        table.blocks, table.num_freed = [NO_BLOCK] * first + blocks, first
        return blocks[: len(table.host_blocks)]

    def _find_seen(self, cache: SequenceCache, digests: Sequence[bytes]) -> tuple[int, list[int]]:
        """Index of the first block that a sequence needs, and the cached blocks from there on."""
        if cache.host_blocks:  # the sequence is swapped out
            return cache.windowed.num_freed, []
        first = self.first_seen(cache, self.blocks.tokens_in(len(digests)))
        return first, self.blocks.find(digests[first:])

    def _length(self, cache: SequenceCache, first: int, num_tokens: int) -> int:
        """Length of a sequence's window-block table at admission; ``first`` is the first block that its next token attends to."""
        length = self.blocks.blocks_for(num_tokens)
        if not cache.keeps_windows:
            length = min(length, first + self._held_between_steps)
        return max(length, first + len(cache.windowed.host_blocks))

    def reuse_newly_cached(self, cache: SequenceCache, digests: Sequence[bytes], num_own: int) -> None:
        """Share the cached blocks of ``digests``, which ``find`` has truncated, from index ``num_own`` on."""
        table, last = cache.windowed, len(digests)
        begin = max(num_own, self.first_seen(cache, self.blocks.tokens_in(last)))
        shared, own = self.blocks.acquire(self.blocks.find(digests[begin:]), 0), table.blocks[num_own:last]
        if begin > num_own:  # no token attends to the blocks between the sequence's own and the shared ones
            own, table.num_freed = table.blocks[table.num_freed : last], begin
        table.blocks[num_own:last] = [NO_BLOCK] * (begin - num_own) + shared
        self.blocks.free(own)
        table.num_known = min(table.num_known, num_own)

    def register(self, cache: SequenceCache, begin: int, end: int) -> None:
        """Register the full blocks at indices ``begin`` to ``end`` (exclusive) of the table, so that other sequences can share them."""
        for index in range(max(begin, cache.windowed.num_freed), end):
            self.blocks.register(cache.windowed.blocks[index], cache.digests[index])

    def advance(self, cache: SequenceCache, num_tokens: int) -> None:
        """Remember a sequence of the step that is being composed, so that ``free_unseen`` frees its old blocks.

        Args:
            num_tokens: tokens of the sequence's context once the step has run, without drafted ones, which may be rejected.
        """
        self._unseen.append((cache, num_tokens))

    def free_unseen(self) -> None:
        """Free the blocks that no later token attends to, once a step is composed. The step may still read them: later
        steps that write to them run after it, as every stage runs steps in order."""
        for cache, num_tokens in self._unseen:
            if cache.saved_slot is not None:  # the sequence may roll back to the saved state
                num_tokens = min(num_tokens, cache.num_saved)
            self.free_before(cache, num_tokens)
        self._unseen = []

    def free_before(self, cache: SequenceCache, num_tokens: int) -> None:
        """Free the blocks that no token after the first ``num_tokens`` attends to."""
        table, first = cache.windowed, self.first_seen(cache, num_tokens)
        if first > table.num_freed:
            # Blocks in the middle of an answer are unlikely to be reused: they must not displace cached prompts.
            for block in table.blocks[max(table.num_freed, self.blocks.full_blocks(cache.last_snapshot)) : first]:
                if not self.blocks.is_shared(block):
                    self.blocks.unregister(block)
            self.blocks.free(table.blocks[table.num_freed : first])
            table.num_freed = first
