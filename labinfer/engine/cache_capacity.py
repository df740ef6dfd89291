"""Cache capacity: number of KV blocks and state slots that fit in a rank's memory; ranks and the simulator use it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

STATES_EACH = 2
"""State slots per running sequence: one for its own state, and one for a shared snapshot."""
STATE_FRACTION = 0.5
"""Maximum fraction of the cache memory for recurrent states."""
WINDOWS_EACH = 2
"""Windows per running sequence for which window blocks are useful: the sequence's own, and one cached for other sequences."""
BLOCKS_TO_WINDOW_BLOCK = 4
"""Full-attention blocks per window block, if memory is short. With this ratio, sequences of four window lengths exhaust
both pools together."""
DRAFT_STATE_SHARE = 0.2
"""Fraction of the cache memory counted as a draft model's. Its states take at most ``STATE_FRACTION`` of that part."""

Summed = TypeVar("Summed")


@dataclass(frozen=True, kw_only=True)
class WindowNeeds:
    """Minimum number, and maximum useful number, of window blocks (KV blocks of sliding-window layers)."""

    window: int
    """Window size in tokens."""
    least: int
    """Minimum number of blocks for a sequence to advance."""
    useful: int
    """Maximum useful number of blocks: those of all running sequences, and equally many for the prefix cache."""


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding-window attention: the window size, and the KV blocks that a sequence needs in such layers."""

    num_tokens: int
    """Window size in tokens, the query's own token included; 0 for a model without windows."""
    block_size: int

    @property
    def blocks_between_steps(self) -> int:
        """Maximum number of blocks that a sequence holds between two steps, for the tokens that its next token attends to."""
        return self._spanned_blocks(max(1, self.num_tokens - 1))

    def least_blocks(self, chunk: int, kept: int | None = None) -> int:
        """Minimum number of blocks for a sequence to advance.

        Args:
            chunk: maximum number of tokens of a sequence in a step.
            kept: tokens at the start that a context shift keeps (``--keep``); None without context shifts. A shift
                leaves about half of the context. If the window is longer than that half, the shift moves earlier tokens
                back into it, so the sequence keeps all its window blocks.
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
        """Numbers of window blocks for this window; None if separate window blocks save no memory, as a sequence needs
        as many as with full attention.

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
        """Maximum number of blocks that ``num_tokens`` consecutive tokens (at least one) span, at any alignment."""
        return (num_tokens + self.block_size - 2) // self.block_size + 1


@dataclass(frozen=True, kw_only=True)
class BlockRoom:
    """A rank's memory for KV blocks."""

    num_bytes: int
    block_bytes: int
    """Bytes of a block over all full-attention layers."""
    window_block_bytes: int = 0
    """Bytes of a window block over all sliding-window layers."""

    def blocks(self, num_window_blocks: int, useful: int) -> int:
        """Number of full-attention blocks that fit beside ``num_window_blocks`` window blocks.

        Args:
            useful: upper limit; more blocks could never be filled.
        """
        left = self.num_bytes - num_window_blocks * self.window_block_bytes
        return max(0, min(useful, left // max(1, self.block_bytes)))

    def whole_blocks(self, useful: int) -> int:
        """Number of blocks that fit if all layers keep all tokens, without separate window blocks."""
        return max(0, min(useful, self.num_bytes // max(1, self.block_bytes + self.window_block_bytes)))

    def window_blocks(self, needs: WindowNeeds) -> int:
        """Number of window blocks: as many as fit with ``BLOCKS_TO_WINDOW_BLOCK`` full-attention blocks each, within the limits in ``needs``."""
        share = self.num_bytes // max(1, BLOCKS_TO_WINDOW_BLOCK * self.block_bytes + self.window_block_bytes)
        return min(needs.useful, max(needs.least, share))


def sum_fields(kind: type[Summed], items: Iterable[Summed]) -> Summed:
    """Sum dataclasses of one ``kind`` field by field."""
    items = list(items)
    return kind(**{f.name: sum(getattr(item, f.name) for item in items) for f in fields(kind)})


@dataclass(frozen=True, kw_only=True)
class CacheRoom:
    """Cache memory of a rank, with the bytes of a block and of a sequence's state; or the sums over ranks that share a memory."""

    num_bytes: int
    """Bytes for blocks and states; negative if the weights alone exceed the memory."""
    block_bytes: int
    """Bytes of a block over all full-attention layers."""
    window_block_bytes: int = 0
    """Bytes of a window block over all sliding-window layers."""
    state_bytes: int = 0
    """Bytes of a sequence's recurrent state."""

    @classmethod
    def sum(cls, rooms: Iterable[CacheRoom]) -> CacheRoom:
        """Sum ``rooms``, of ranks that share one memory."""
        return sum_fields(cls, rooms)

    def num_states(self, max_num_seqs: int) -> int:
        """Number of state slots for ``max_num_seqs`` running sequences."""
        return states_that_fit(max(0, self.num_bytes), self.state_bytes, max_num_seqs)

    def for_blocks(self, max_num_seqs: int) -> BlockRoom:
        """Memory that the recurrent states of ``max_num_seqs`` sequences leave for KV blocks."""
        return BlockRoom(
            num_bytes=self.num_bytes - self.num_states(max_num_seqs) * self.state_bytes,
            block_bytes=self.block_bytes,
            window_block_bytes=self.window_block_bytes,
        )

    def used_bytes(self, blocks: BlockCounts) -> int:
        """Bytes that the KV and window blocks of ``blocks`` take on this rank."""
        num_windowed = blocks.num_window_blocks or blocks.num_blocks
        return blocks.num_blocks * self.block_bytes + num_windowed * self.window_block_bytes


def pool_rooms(rooms: Sequence[CacheRoom], memories: Sequence[Hashable]) -> list[CacheRoom]:
    """Pool the memory of ranks that share it: each of these ranks gets the sum.

    The memory is not split beforehand, because all ranks have equally many blocks but different bytes per block.

    Args:
        memories: identifier of each rank's memory.
    """
    sums = {
        name: CacheRoom.sum(room for room, own in zip(rooms, memories, strict=True) if own == name)
        for name in set(memories)
    }
    return [sums[name] for name in memories]


@dataclass(frozen=True, kw_only=True)
class BlockCounts:
    """Number of KV blocks that fit on the ranks, and that every rank uses."""

    of_rank: tuple[int, ...]
    """Number of blocks that fit on each rank."""
    num_window_blocks: int = 0
    """Window blocks on every rank; 0 if sliding-window layers keep all tokens."""
    whole: int
    """Blocks that would fit on every rank if all layers kept all tokens."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks on every rank: the minimum over ``of_rank``."""
        return min(self.of_rank)

    @property
    def gain(self) -> float:
        """Ratio of the tokens that fit with window blocks to those that fit without (all layers keep all tokens)."""
        return self.num_blocks / max(1, self.whole)

    def capped(self, planned: int) -> BlockCounts:
        """Limit each rank to ``planned`` blocks, the number in a layout plan; 0 means that there is no plan. If ``planned``
        blocks fit without separate window blocks, there are none."""
        if not planned or planned >= self.num_blocks:
            return self
        return replace(
            self,
            of_rank=tuple(min(count, planned) for count in self.of_rank),
            num_window_blocks=self.num_window_blocks if planned > self.whole else 0,
        )


def count_blocks(rooms: Sequence[BlockRoom], useful: int, needs: WindowNeeds | None, fixed: int = 0) -> BlockCounts:
    """Count the KV blocks of every rank. Sliding-window layers get separate window blocks if more tokens fit then.

    Args:
        useful: upper limit; more blocks could never be filled.
        fixed: number of blocks that the user asks for; 0 for as many as fit.
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
    """Number of state slots that fit in ``STATE_FRACTION`` of ``room`` bytes, at most ``each`` per sequence; ``each``
    per sequence if a state takes no bytes."""
    useful = each * max_num_seqs
    return min(useful, int(room * STATE_FRACTION) // bytes_per_state) if bytes_per_state else useful


def draft_states_that_fit(room: int, bytes_per_state: int, max_num_seqs: int) -> int:
    """Number of state slots of a draft model in ``room`` bytes of cache memory; 0 if a state takes no bytes."""
    return states_that_fit(int(room * DRAFT_STATE_SHARE), bytes_per_state, max_num_seqs) if bytes_per_state else 0
