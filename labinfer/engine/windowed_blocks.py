"""``WindowedBlocks``: blocks of layers with a sliding window, free again as soon as no token to come sees theirs."""

from __future__ import annotations

from collections.abc import Sequence

from labinfer.engine.block_manager import BlockManager
from labinfer.engine.block_table import BlockGroup, SequenceCache
from labinfer.engine.cache_capacity import SlidingWindow

NO_BLOCK = 0
"""Stands in tables where a sequence never had a block: any number that a block may have."""


class WindowedBlocks:
    """Pools of the windowed layers' blocks, and which of them sequences need.

    A token sees ``window`` tokens, itself included. Between two steps a sequence so needs the blocks of its last ``window - 1``
    tokens, and in a step those of the step's tokens, too. A table keeps its places for all tokens; those in front are stale,
    which ``functions.protocols.PagedAttention`` allows. Freed blocks can be found as long as nobody takes them.

    Args:
        window: tokens; the largest window of any layer.
        chunk: tokens of a sequence in a step, at most.
        blocks, host: the pools, of the same block size as those of the other layers.
    """

    def __init__(self, window: int, chunk: int, blocks: BlockManager, host: BlockManager):
        self.group = BlockGroup(blocks, host, "copy_window", "swap_out_window", "swap_in_window")
        self.blocks, self._window, self._chunk = blocks, window, chunk
        self._held_between_steps = SlidingWindow(window, blocks.block_size).blocks_between_steps
        self._unseen: list[tuple[SequenceCache, int]] = []

    def fits_in(self, num_tokens: int) -> bool:
        """Whether so many tokens are all that the next one sees."""
        return num_tokens >= self._window - 1

    def first_seen(self, cache: SequenceCache, num_tokens: int) -> int:
        """Index of the first block that the token behind the first ``num_tokens`` sees."""
        return 0 if cache.keeps_windows else self.blocks.full_blocks(max(0, num_tokens - self._window + 1))

    def blocks_for_beams(self, num_beams: int, num_tokens: int, keeps_windows: bool) -> int:
        """Blocks without which so many beams may not be able to go on, each of so many tokens at most."""
        each = self.blocks.blocks_for(num_tokens)
        if not keeps_windows:
            each = min(each, self._held_between_steps + 1)
        return num_beams * each + self.blocks.blocks_for(self._chunk)

    def find(self, cache: SequenceCache, digests: Sequence[bytes], num_own: int = 0) -> int:
        """Length of the longest prefix of this chain behind which a sequence can go on: the blocks that its next token sees
        are known, or among the sequence's first ``num_own``."""
        num_known, longest = num_own, num_own
        for count, digest in enumerate(digests[num_own:], num_own + 1):
            num_known = num_known + 1 if self.blocks.find([digest]) else 0
            if num_known >= count - self.first_seen(cache, self.blocks.tokens_in(count)):
                longest = count
        return longest

    def has_room(self, cache: SequenceCache, digests: Sequence[bytes], num_tokens: int) -> bool:
        """Whether ``admit`` can be called with these, and there is room then for the first chunk and for a block that each
        other sequence begins before it frees one."""
        first, shared = self._find_seen(cache, digests)
        length = self._length(cache, first, num_tokens)
        chunk = min(self.blocks.blocks_for(self._chunk), max(0, self.blocks.blocks_for(num_tokens) - length))
        idle = sum(not self.blocks.is_used(block) for block in shared)
        others = (self.blocks.num_blocks - self.blocks.num_free) // self._held_between_steps
        return length - first - len(shared) + chunk + others <= self.blocks.num_free - idle

    def admit(self, cache: SequenceCache, digests: Sequence[bytes], num_tokens: int) -> list[int]:
        """Take as many blocks as a sequence of ``num_tokens`` tokens needs between two steps, so that it grows no more than others
        that run. Those of ``digests``, a chain that ``find`` has cut, are shared. Returns the blocks that what was swapped
        out goes to."""
        table = cache.windowed
        first, shared = self._find_seen(cache, digests)
        blocks = self.blocks.acquire(shared, self._length(cache, first, num_tokens) - first - len(shared))
        table.blocks, table.num_freed = [NO_BLOCK] * first + blocks, first
        return blocks[: len(table.host_blocks)]

    def _find_seen(self, cache: SequenceCache, digests: Sequence[bytes]) -> tuple[int, list[int]]:
        """The index of the first block that a sequence needs, and the known ones from there on."""
        if cache.host_blocks:  # it is swapped out
            return cache.windowed.num_freed, []
        first = self.first_seen(cache, self.blocks.tokens_in(len(digests)))
        return first, self.blocks.find(digests[first:])

    def _length(self, cache: SequenceCache, first: int, num_tokens: int) -> int:
        """Blocks of the table of a sequence that is admitted."""
        length = self.blocks.blocks_for(num_tokens)
        if not cache.keeps_windows:
            length = min(length, first + self._held_between_steps)
        return max(length, first + len(cache.windowed.host_blocks))

    def reuse_newly_cached(self, cache: SequenceCache, digests: Sequence[bytes], num_own: int) -> None:
        """Share the blocks of this chain, which ``find`` has cut, from number ``num_own`` on."""
        table, last = cache.windowed, len(digests)
        begin = max(num_own, self.first_seen(cache, self.blocks.tokens_in(last)))
        shared, own = self.blocks.acquire(self.blocks.find(digests[begin:]), 0), table.blocks[num_own:last]
        if begin > num_own:  # blocks between the sequence's own ones and the shared ones are seen by no token
            own, table.num_freed = table.blocks[table.num_freed : last], begin
        table.blocks[num_own:last] = [NO_BLOCK] * (begin - num_own) + shared
        self.blocks.free(own)
        table.num_known = min(table.num_known, num_own)

    def register(self, cache: SequenceCache, begin: int, end: int) -> None:
        """Register blocks number ``begin`` up to before ``end`` of the table, all full, so that other sequences can find them."""
        for index in range(max(begin, cache.windowed.num_freed), end):
            self.blocks.register(cache.windowed.blocks[index], cache.digests[index])

    def advance(self, cache: SequenceCache, num_tokens: int) -> None:
        """Note a sequence of the step that is being composed, for ``free_unseen``.

        Args:
            num_tokens: tokens of its context once the step has run, without drafted ones, which may be taken back.
        """
        self._unseen.append((cache, num_tokens))

    def free_unseen(self) -> None:
        """Free the blocks that no token to come sees, once a step is composed: it may still read them, later ones may write them,
        and every stage runs steps in order."""
        for cache, num_tokens in self._unseen:
            if cache.saved_slot is not None:  # the sequence may go back to a saved state
                num_tokens = min(num_tokens, cache.num_saved)
            self.free_before(cache, num_tokens)
        self._unseen = []

    def free_before(self, cache: SequenceCache, num_tokens: int) -> None:
        """Free the blocks that no token behind the first ``num_tokens`` sees."""
        table, first = cache.windowed, self.first_seen(cache, num_tokens)
        if first > table.num_freed:
            # Nobody is likely to go on from the middle of an answer: its blocks must not take the place of what prompts left.
            for block in table.blocks[max(table.num_freed, self.blocks.full_blocks(cache.last_snapshot)) : first]:
                if not self.blocks.is_shared(block):
                    self.blocks.unregister(block)
            self.blocks.free(table.blocks[table.num_freed : first])
            table.num_freed = first
