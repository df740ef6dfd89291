"""Capacity of a rank's cache: how many KV blocks and slots for states so many bytes hold. Ranks and simulations count alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

STATES_EACH = 2
"""Slots for each sequence that may run at once: its own, and one for snapshots that are shared."""
STATE_FRACTION = 0.5
"""Part of the cache's memory that states may take at most."""
WINDOWS_EACH = 2
"""Windows for each sequence that may run at once: its own, and one whose tokens others may go on from."""
BLOCKS_TO_WINDOW_BLOCK = 4
"""Blocks of the layers that see all tokens to one of those with a window, where memory is short: with sequences of four windows
both are used up together."""
DRAFT_STATE_SHARE = 0.2
"""Part of the memory for caches that states of a draft model may have room in; they take at most half of it."""

Summed = TypeVar("Summed")


@dataclass(frozen=True, kw_only=True)
class WindowNeeds:
    """Blocks of windowed layers that are of use."""

    window: int
    """Tokens that a token sees at most."""
    least: int
    """Without these a sequence may not be able to go on."""
    useful: int
    """Blocks that all sequences need, and again as many in which tokens of others are found."""


@dataclass(frozen=True)
class SlidingWindow:
    """A sliding window of attention, and the KV blocks that sequences need in the layers that have it."""

    num_tokens: int
    """Tokens that a token sees, itself included; 0 for a model without windows."""
    block_size: int

    @property
    def blocks_between_steps(self) -> int:
        """Blocks that a sequence holds between two steps: those of the tokens before the next one that it sees."""
        return self._spanned_blocks(max(1, self.num_tokens - 1))

    def least_blocks(self, chunk: int, kept: int | None = None) -> int:
        """Blocks without which a sequence may not be able to go on.

        Args:
            chunk: tokens of a sequence in a step, at most.
            kept: tokens that a context shift keeps; None without any. A context so short that half of it is in the window keeps
                all its blocks.
        """
        between_steps = self.blocks_between_steps
        if kept is not None:
            in_shift = self._spanned_blocks(2 * self.num_tokens + self.block_size)
            between_steps = max(between_steps, -(-kept // self.block_size) + in_shift)
        return between_steps + -(-chunk // self.block_size)

    def needs(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill_size: int,
        max_model_len: int,
        kept: int | None,
    ) -> WindowNeeds | None:
        """The needs of a model with this window; None if the window saves no blocks: a sequence needs as many as without it.

        Args:
            kept: see ``least_blocks``.
        """
        if not self.num_tokens:
            return None
        least = self.least_blocks(min(chunked_prefill_size, max_num_batched_tokens), kept)
        if least >= -(-max_model_len // self.block_size):
            return None
        useful = WINDOWS_EACH * max_num_seqs * self.blocks_between_steps - (-max_num_batched_tokens // self.block_size)
        return WindowNeeds(window=self.num_tokens, least=least, useful=max(least, useful))

    def _spanned_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` in a row (at least one) are in at most, wherever the first one is in its block."""
        return (num_tokens + self.block_size - 2) // self.block_size + 1


@dataclass(frozen=True, kw_only=True)
class BlockRoom:
    """A rank's memory for KV blocks."""

    num_bytes: int
    block_bytes: int
    """Bytes of a block of all layers that see all tokens."""
    window_block_bytes: int = 0
    """Bytes of a block of all layers with a window."""

    def blocks(self, num_window_blocks: int, useful: int) -> int:
        """Blocks of the first kind beside so many of the second.

        Args:
            useful: more than this many can never be filled.
        """
        left = self.num_bytes - num_window_blocks * self.window_block_bytes
        return max(0, min(useful, left // max(1, self.block_bytes)))

    def whole_blocks(self, useful: int) -> int:
        """Blocks where all layers hold all tokens."""
        return max(0, min(useful, self.num_bytes // max(1, self.block_bytes + self.window_block_bytes)))

    def window_blocks(self, needs: WindowNeeds) -> int:
        """Blocks of windowed layers: all that are of use, or their share of what there is."""
        share = self.num_bytes // max(1, BLOCKS_TO_WINDOW_BLOCK * self.block_bytes + self.window_block_bytes)
        return min(needs.useful, max(needs.least, share))


def sum_fields(kind: type[Summed], items: Iterable[Summed]) -> Summed:
    """A dataclass whose fields are the sums of those of ``items``."""
    items = list(items)
    return kind(**{f.name: sum(getattr(item, f.name) for item in items) for f in fields(kind)})


@dataclass(frozen=True, kw_only=True)
class CacheRoom:
    """Memory for a cache, and what a block and a sequence take of it: of a rank, or the sums of ranks that share a memory."""

    num_bytes: int
    """For blocks and states; negative where weights alone are too large."""
    block_bytes: int
    """Bytes of a block of all layers that see all tokens."""
    window_block_bytes: int = 0
    """Bytes of a block of all layers with a window."""
    state_bytes: int = 0
    """Bytes of a sequence's state."""

    @classmethod
    def sum(cls, rooms: Iterable[CacheRoom]) -> CacheRoom:
        """The room of ranks that share a memory."""
        return sum_fields(cls, rooms)

    def num_states(self, max_num_seqs: int) -> int:
        """Slots for states."""
        return states_that_fit(max(0, self.num_bytes), self.state_bytes, max_num_seqs)

    def for_blocks(self, max_num_seqs: int) -> BlockRoom:
        """Room beside the states."""
        return BlockRoom(
            num_bytes=self.num_bytes - self.num_states(max_num_seqs) * self.state_bytes,
            block_bytes=self.block_bytes,
            window_block_bytes=self.window_block_bytes,
        )

    def used_bytes(self, blocks: BlockCounts) -> int:
        """Bytes that so many blocks take of it."""
        num_windowed = blocks.num_window_blocks or blocks.num_blocks
        return blocks.num_blocks * self.block_bytes + num_windowed * self.window_block_bytes


def pool_rooms(rooms: Sequence[CacheRoom], memories: Sequence[Hashable]) -> list[CacheRoom]:
    """The room that each has together with all others in the same memory: how they share it out is left to them, as all have the
    same number of blocks, and some take more for a block than others.

    Args:
        memories: name of the memory of each.
    """
    sums = {
        name: CacheRoom.sum(room for room, own in zip(rooms, memories, strict=True) if own == name)
        for name in set(memories)
    }
    return [sums[name] for name in memories]


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """KV blocks of all ranks."""

    of_rank: tuple[int, ...]
    """Blocks that each has room for."""
    num_window_blocks: int = 0
    """Blocks of windowed layers on each; 0 where they hold all tokens as the others do."""
    whole: int
    """Blocks that all would have room for if all layers held all tokens."""

    @property
    def num_blocks(self) -> int:
        """The least of what each has room for."""
        return min(self.of_rank)

    @property
    def gain(self) -> float:
        """Tokens that fit, by those that would if all layers held all tokens."""
        return self.num_blocks / max(1, self.whole)

    def capped(self, planned: int) -> BlockCounts:
        """The counts with no more than the blocks of a plan; 0 for no plan. Windowed layers need none of their own where all layers
        have room for so many."""
        if not planned or planned >= self.num_blocks:
            return self
        return replace(
            self,
            of_rank=tuple(min(count, planned) for count in self.of_rank),
            num_window_blocks=self.num_window_blocks if planned > self.whole else 0,
        )


def count_blocks(rooms: Sequence[BlockRoom], useful: int, needs: WindowNeeds | None, fixed: int = 0) -> BlockCounts:
    """KV blocks of ranks, of which all have as many. Layers with a window have blocks of their own where more tokens fit then.

    Args:
        useful: more than this many can never be filled.
        fixed: blocks that the user asks for; 0 for as many as there is room for.
    """
    whole = [fixed or room.whole_blocks(useful) for room in rooms]
    if needs is not None:
        num_window_blocks = needs.useful if fixed else min(room.window_blocks(needs) for room in rooms)
        of_rank = [fixed or room.blocks(num_window_blocks, useful) for room in rooms]
        gains = num_window_blocks < fixed if fixed else min(of_rank) > min(whole)
        if gains:
            return BlockCounts(of_rank=tuple(of_rank), num_window_blocks=num_window_blocks, whole=min(whole))
    return BlockCounts(of_rank=tuple(whole), whole=min(whole))


def states_that_fit(room: int, bytes_per_state: int, max_num_seqs: int, each: int = STATES_EACH) -> int:
    """Slots for states in so many bytes, which KV blocks share; as many as are useful where a state takes nothing."""
    useful = each * max_num_seqs
    return min(useful, int(room * STATE_FRACTION) // bytes_per_state) if bytes_per_state else useful


def draft_states_that_fit(room: int, bytes_per_state: int, max_num_seqs: int) -> int:
    """Slots for states of a draft model in so many bytes; none where a state takes nothing."""
    return states_that_fit(int(room * DRAFT_STATE_SHARE), bytes_per_state, max_num_seqs) if bytes_per_state else 0
