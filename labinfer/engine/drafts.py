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
        num_drafted = 0
        for sequence in chosen:
            cache = sequence.cache
            limit = min(
                room - num_drafted,
                self._max_tokens - 1,
                sequence.max_context - cache.num_tokens,
                sequence.max_tokens - sequence.num_output_tokens - 1,
            )
            if limit <= 0 or not sequence.may_draft:
                continue
            proposed = self.proposer.propose(sequence, limit)
            assert len(proposed) <= limit, f"{len(proposed)} tokens were drafted where {limit} have room"
            sequence.set_draft(proposed, eos_token_ids)
            count = len(sequence.draft)
            if count and not self._tables.reserve(cache, count):
                sequence.set_draft((), eos_token_ids)
                continue
            self._tables.advance(cache, sequence.token_ids, count)
            chosen[sequence] += count
            num_drafted += count
        self._counts["drafted"] += num_drafted
        return num_drafted

    def settle(self, sequence: Sequence, num_drafted: int) -> None:
        """Keep keys and values of drafted tokens as far as they were right, once the step's tokens are the sequence's."""
        if not num_drafted:
            return
        num_rejected = sequence.num_scheduled - (len(sequence.token_ids) - 1)
        self._counts["accepted"] += num_drafted - num_rejected
        if num_rejected:
            self._tables.truncate(sequence.cache, sequence.cache.num_tokens - num_rejected)
