"""Drafts: guessed next tokens that decodes run along with their own, and what becomes of wrong ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping

from labinfer.engine.block_tables import BlockTables
from labinfer.engine.proposer import Proposer
from labinfer.engine.sequence import Sequence


class Drafts:
    """Guesses of a proposer in the micro-batches of a scheduler.

    Args:
        proposer: None for no guesses.
        max_tokens: of a sequence in a step, the one that is no guess included.
        counts: ``drafted`` and ``accepted`` are counted here.
    """

    def __init__(self, proposer: Proposer | None, tables: BlockTables, max_tokens: int, counts: Counter[str]):
        self.proposer = proposer
        self._tables, self._max_tokens, self._counts = tables, max_tokens, counts

    def extend(self, chosen: MutableMapping[Sequence, int], room: int, eos_token_ids: frozenset[int]) -> int:
        """Let the decodes that were chosen run drafted tokens, too. Returns how many.

        A draft takes free blocks only, nobody is preempted for it; and it stays in front of where the context is shifted,
        which so happens between the same tokens as without drafts.

        Args:
            chosen: tokens to run by sequence; counted up.
            room: tokens that the step has room for.
        """
        if self.proposer is None or self._tables.states is not None:  # a state could not forget wrong guesses
            return 0
        limits = {sequence: limit for sequence in chosen if (limit := self._limit(sequence, room)) > 0}
        if not limits:
            return 0
        proposals = self.proposer.propose(list(limits), list(limits.values()))
        num_drafted = 0
        for (sequence, limit), proposed in zip(limits.items(), proposals, strict=True):
            cache = sequence.cache
            assert len(proposed) <= limit, f"{len(proposed)} tokens were drafted where {limit} have room"
            sequence.set_draft(proposed[: room - num_drafted], eos_token_ids)
            count = len(sequence.draft)
            if count and not self._tables.reserve(cache, count):
                sequence.set_draft((), eos_token_ids)
                continue
            self._tables.advance(cache, sequence.token_ids, count)
            chosen[sequence] += count
            num_drafted += count
        self._counts["drafted"] += num_drafted
        return num_drafted

    def _limit(self, sequence: Sequence, room: int) -> int:
        """Tokens that may be drafted for a sequence."""
        if not sequence.may_draft:
            return 0
        return min(
            room,
            self._max_tokens - 1,
            sequence.max_context - sequence.cache.num_tokens,
            sequence.max_tokens - sequence.num_output_tokens - 1,
        )

    def settle(self, sequence: Sequence, num_drafted: int) -> None:
        """Keep keys and values of drafted tokens as far as they were right, once the step's tokens are the sequence's."""
        if not num_drafted:
            return
        num_rejected = sequence.num_scheduled - (len(sequence.token_ids) - 1)
        self._counts["accepted"] += num_drafted - num_rejected
        if num_rejected:
            self._tables.truncate(sequence.cache, sequence.cache.num_tokens - num_rejected)

    def forget(self, sequences: list[Sequence]) -> None:
        """Forget sequences that have ended."""
        if self.proposer is not None:
            self.proposer.forget(sequences)
