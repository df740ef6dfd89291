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
        max_draft: tokens that are guessed for a sequence in a step at most.
        max_chunk: tokens of a sequence in a step at most, all together.
        counts: ``drafted`` and ``accepted`` are counted here.
    """

    def __init__(
        self, proposer: Proposer | None, tables: BlockTables, *, max_draft: int, max_chunk: int, counts: Counter[str]
    ):
        self.proposer = proposer
        self._tables, self._max_draft, self._max_chunk, self._counts = tables, max_draft, max_chunk, counts

    def extend(self, chosen: MutableMapping[Sequence, int], room: int, eos_token_ids: frozenset[int]) -> int:
        """Let the decodes that were chosen run drafted tokens, too. Returns how many.

        A draft takes free blocks only, nobody is preempted for it; and it stays in front of where the context is shifted,
        which so happens between the same tokens as without drafts.

        Args:
            chosen: tokens to run by sequence; counted up.
            room: tokens that the step has room for.
        """
        if self.proposer is None:
            return 0
        limits = {seq: limit for seq, count in chosen.items() if (limit := self._limit(seq, count, room)) > 0}
        if not limits:
            return 0
        proposals = self.proposer.propose(list(limits), list(limits.values()))
        num_drafted = 0
        for (sequence, limit), proposed in zip(limits.items(), proposals, strict=True):
            cache = sequence.cache
            assert len(proposed) <= limit, f"{len(proposed)} tokens were drafted where {limit} have room"
            sequence.set_draft(proposed[: room - num_drafted], eos_token_ids)
            count = len(sequence.draft)
            if not count:
                continue
            if self._tables.draft_limit(cache) == 0 or not self._tables.reserve(cache, count):
                sequence.set_draft((), eos_token_ids)
                continue
            self._tables.save_state(cache, cache.num_tokens - chosen[sequence])
            self._tables.advance(cache, sequence.token_ids, count)
            chosen[sequence] += count
            num_drafted += count
        self._counts["drafted"] += num_drafted
        return num_drafted

    def _limit(self, sequence: Sequence, count: int, room: int) -> int:
        """Tokens that may be drafted for a sequence of which ``count`` are run without."""
        if not sequence.may_draft or sequence.num_unscheduled:
            return 0
        limit = self._tables.draft_limit(sequence.cache)
        return min(
            room,
            room if limit is None else limit,
            self._max_draft,
            self._max_chunk - count,
            sequence.max_context - sequence.cache.num_tokens,
            sequence.max_tokens - sequence.num_output_tokens - 1,
        )

    def settle(self, sequence: Sequence, num_drafted: int) -> None:
        """Keep keys, values and states of drafted tokens as far as they were right, once the step's tokens are the sequence's."""
        if not num_drafted:
            return
        num_rejected = sequence.num_scheduled - (len(sequence.token_ids) - 1)
        self._counts["accepted"] += num_drafted - num_rejected
        if num_rejected:
            self._tables.truncate(sequence.cache, sequence.cache.num_tokens - num_rejected)
        else:
            self._tables.drop_saved(sequence.cache)

    def forget(self, sequences: list[Sequence]) -> None:
        """Forget sequences that have ended."""
        if self.proposer is not None:
            self.proposer.forget(sequences)
