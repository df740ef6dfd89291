"""Drafts: adds drafted tokens to a scheduler's micro-batches, and records their acceptance (speculative decoding)."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from functools import lru_cache

from labinfer.base.errors import PeerLost, WaitTimeout, first_line
from labinfer.base.plan import BatchPlan
from labinfer.base.plugins import locate
from labinfer.engine.block_tables import BlockTables
from labinfer.engine.draft_lengths import DraftLengths
from labinfer.engine.micro_batches import MicroBatchCount
from labinfer.engine.proposer import Proposer
from labinfer.engine.proposers import source_path
from labinfer.engine.round_overheads import RoundOverheads
from labinfer.engine.sequence import Sequence
from labinfer.engine.speculation import Speculation

logger = logging.getLogger(__name__)

MIN_TIME_RATIO = 0.1
"""Lower bound of a round's predicted time, as a fraction of the time measured at startup."""


class Drafts(Speculation):
    """Adds a proposer's drafts to the micro-batches of a scheduler.

    A proposer that fails is logged and not called again.

    Args:
        proposer: drafts the tokens; None for no drafts.
        max_tokens: maximum draft length.
        max_chunk: maximum number of tokens of a sequence in a step, drafted ones included.
        vocab_size: number of token ids.
        clock: monotonic seconds.
        draft_times: predicted seconds of rounds with drafts; None without measurements.
        chooses_lengths: whether draft lengths are chosen by ``draft_times``, if given; otherwise each draft is as long
            as possible.
        continuous: whether sequences with tokens in flight may get further draft chunks.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        tables: BlockTables,
        *,
        max_tokens: int,
        max_chunk: int,
        vocab_size: int,
        clock: Callable[[], float],
        draft_times: MicroBatchCount | None = None,
        chooses_lengths: bool = True,
        continuous: bool = True,
    ):
        super().__init__()
        self.proposer = proposer
        self._tables, self._vocab_size = tables, vocab_size
        self._max_tokens, self._max_chunk = max_tokens, max_chunk
        self._clock = clock
        self._draft_time = self._drafting_step_time = None
        if draft_times is not None:  # each is called up to 64 times per step
            self._draft_time = lru_cache(1 << 14)(draft_times.draft_time)
            self._drafting_step_time = lru_cache(1 << 14)(draft_times.drafting_step_time)
        self.continuous = continuous
        # Counts: drafts (one per sequence and step), continued (drafts behind others in flight), drafted and accepted (tokens, also
        # by position in the draft, such as accepted_0), draft_seconds (time of the proposer), saved_seconds (time of the steps that
        # accepted tokens saved, minus the cost of all drafts), drafter_failures.
        self._lengths = DraftLengths(max_length=max_tokens)
        self._chooses_lengths = chooses_lengths and draft_times is not None
        self._asked_before: set[Sequence] = set()  # sequences that the proposer knows
        self._token_seconds = 0.0  # predicted seconds per token of the last drafted step without its drafts
        self._overheads = RoundOverheads(num_baseline=2 if self._uses_mtp else 1)
        self._last_result: float | None = None  # when the last result arrived; None after idling
        self._seconds_since = 0.0  # seconds in the proposer since the last result
        self._is_plain = False  # whether the current round is a baseline without drafts

    def propose(
        self,
        chosen: MutableMapping[Sequence, int],
        *,
        decodes: list[Sequence],
        waiting: list[Sequence],
        room: int,
        num_waiting: int,
        eos_token_ids: frozenset[int],
        num_micro_batches: int,
        num_in_flight: int,
    ) -> None:
        if self.proposer is None:
            return
        self._extend(chosen, decodes, room, eos_token_ids, num_micro_batches)
        if waiting:
            self._extend_in_flight(
                chosen,
                waiting,
                num_sequences=num_waiting,
                room=room,
                eos_token_ids=eos_token_ids,
                count=num_in_flight,
            )
        self._plan_mtp(chosen, num_micro_batches)

    def _extend(
        self,
        chosen: MutableMapping[Sequence, int],
        decodes: list[Sequence],
        room: int,
        eos_token_ids: frozenset[int],
        num_micro_batches: int,
    ) -> None:
        """Add drafted tokens to the chosen decodes.

        A draft uses free blocks only and preempts no sequence. It ends before the next context shift, so that drafts do
        not change the tokens between which shifts occur.

        Args:
            chosen: sequence → number of tokens to run; the drafted tokens are added.
            decodes: sequences of ``chosen`` that may have a draft.
            room: tokens left in the step's token budget.
            num_micro_batches: number of micro-batches like this one in flight at once.
        """
        num_decodes = len(decodes)
        limits = {seq: limit for seq in decodes if (limit := self._limit(seq, room, self._max_chunk - chosen[seq])) > 0}
        if not self._uses_mtp:
            limits = self._choose(limits, num_decodes, num_micro_batches)
        if not limits:
            return
        num_drafted, draft_seconds = self._draft(limits, chosen, room, eos_token_ids)
        self.counts["draft_seconds"] += draft_seconds
        if self._draft_time is not None:
            usual, longer = (
                self._round_seconds(num_micro_batches, num_micro_batches * num_decodes, count) / num_micro_batches
                for count in (0, num_drafted)
            )
            self.counts["saved_seconds"] += usual - longer - draft_seconds
            self._token_seconds = usual / num_decodes

    def _extend_in_flight(
        self,
        chosen: MutableMapping[Sequence, int],
        in_flight: list[Sequence],
        *,
        num_sequences: int,
        room: int,
        eos_token_ids: frozenset[int],
        count: int,
    ) -> None:
        """Choose draft-only chunks for sequences whose tokens are all in flight. A chunk counts if those tokens are accepted.

        Discarded chunks cost only time of stages that would otherwise be idle. Models with recurrent states get no such
        chunks, as only the state before the oldest chunk is saved. An MTP layer makes none either, as it drafts after
        sampled tokens only.

        Args:
            chosen: sequence → number of tokens to run; empty at the call.
            in_flight: sequences whose tokens are all in flight.
            num_sequences: maximum number of sequences to choose, of those with the fewest chunks in flight.
            room: tokens left in the step's token budget.
            count: number of micro-batches in flight.
        """
        if self.proposer is None or not self.continuous or self._uses_mtp or self._tables.states is not None:
            return
        if self._is_plain:  # a baseline round gets no draft-only chunks either
            return
        limits = {
            sequence: limit
            for sequence in in_flight
            if (limit := self._limit(sequence, room, self._max_chunk - 1 - len(sequence.draft))) > 0
        }
        fewest = min((sequence.num_in_flight for sequence in limits), default=0)
        first = [sequence for sequence in limits if sequence.num_in_flight == fewest][:num_sequences]
        limits = {sequence: limits[sequence] for sequence in first}
        num_before = sum(len(sequence.draft) for sequence in in_flight)
        num_entries = sum(sequence.num_in_flight for sequence in in_flight)

        def round_shape(num_micro_batches: int, num_drafted: int) -> tuple[int, int, float]:
            entries = num_entries + (len(limits) if num_micro_batches > count else 0)
            return num_micro_batches, entries, (num_before + num_drafted) / num_micro_batches

        def seconds(num_micro_batches: int, num_drafted: int) -> float:
            return self._draft_time(*round_shape(num_micro_batches, num_drafted))

        def drafting_step_seconds(num_micro_batches: int, num_drafted: int) -> float:
            return self._drafting_step_time(*round_shape(num_micro_batches, num_drafted))

        if limits and self._chooses_lengths:
            others = [sequence for sequence in in_flight if sequence not in limits]
            limits = self._lengths.choose_further_chunks(limits, others, seconds, drafting_step_seconds, count)
        if not limits:
            return
        num_drafted, draft_seconds = self._draft(limits, chosen, room, eos_token_ids)
        self.counts["continued"] += len(chosen)
        self.counts["draft_seconds"] += draft_seconds
        if chosen and self._draft_time is not None:
            self.counts["saved_seconds"] -= seconds(count + 1, num_drafted) - seconds(count, 0) + draft_seconds

    def _draft(
        self,
        limits: dict[Sequence, int],
        chosen: MutableMapping[Sequence, int],
        room: int,
        eos_token_ids: frozenset[int],
    ) -> tuple[int, float]:
        """Call the proposer, and add its drafts to ``chosen``. Returns the number of drafted tokens, and the proposer's seconds."""
        begin = self._clock()
        proposals = self._propose(limits)
        draft_seconds = self._clock() - begin
        self._seconds_since += draft_seconds
        if self._asked_before.issuperset(limits):  # the first draft of a sequence takes longer, for its prompt
            self._lengths.add_draft_time(draft_seconds, max(limits.values()))
        self._asked_before |= limits.keys()
        num_drafted = 0
        for (sequence, limit), proposed in zip(limits.items(), proposals, strict=True):
            with sequence.with_draft_applied():
                count = sequence.add_draft(proposed[: min(limit, room - num_drafted)], eos_token_ids)
            if not self._take_blocks(sequence, count, chosen.get(sequence, 0)):
                sequence.drop_draft(count)
                continue
            chosen[sequence] = chosen.get(sequence, 0) + count
            num_drafted += count
            self.counts["drafts"] += 1
            for place in range(count):
                self.counts[f"drafted_{place}"] += 1
        self.counts["drafted"] += num_drafted
        return num_drafted, draft_seconds

    def _plan_mtp(self, chosen: MutableMapping[Sequence, int], num_micro_batches: int) -> None:
        """Set the number of tokens that the MTP layer, if there is one, drafts after the tokens that this step samples.

        The layer caches keys and values of its drafted tokens except the last. Drafts are cut to the free blocks for these
        keys and values.

        Args:
            chosen: sequence → number of tokens to run.
            num_micro_batches: see ``propose``.
        """
        if not self._uses_mtp:
            return
        sampled = [sequence for sequence in chosen if sequence.num_unscheduled == 0 and not sequence.request.pooling]
        limits = {sequence: limit for sequence in sampled if (limit := self._limit_mtp(sequence)) > 0}
        limits = self._choose(limits, len(sampled), num_micro_batches)
        for sequence, limit in limits.items():
            sequence.num_mtp_drafts = limit
            if limit > 1 and not self._tables.reserve(sequence.cache, limit - 1):
                room = self._tables.blocks.tokens_in(len(sequence.cache.blocks)) - sequence.cache.num_tokens
                sequence.num_mtp_drafts = min(limit, 1 + room)

    @property
    def _uses_mtp(self) -> bool:
        """Whether an MTP layer drafts: its drafts arrive with the samples of the step before the one that verifies them."""
        return getattr(self.proposer, "drafts_with_samples", False)

    def _limit_mtp(self, sequence: Sequence) -> int:
        """Maximum MTP draft length of a sequence, if all drafted tokens of this step are accepted."""
        if not sequence.may_draft:
            return 0
        num_output_tokens = sequence.num_output_tokens + len(sequence.draft) + 1
        return min(
            self._max_tokens,
            sequence.max_context - sequence.cache.num_tokens - 1,
            sequence.max_tokens - num_output_tokens - 1,
        )

    def _choose(self, limits: dict[Sequence, int], num_decodes: int, num_micro_batches: int) -> dict[Sequence, int]:
        """Choose the draft lengths in a step of ``num_decodes`` decodes; returns ``limits`` if draft lengths are fixed."""
        if not (limits and self._chooses_lengths):
            return limits
        in_round = num_micro_batches * num_decodes
        self._is_plain = self._overheads.needs_baseline_round(in_round)
        if self._is_plain:
            return {}
        return self._lengths.choose(
            limits,
            num_decodes - len(limits),
            lambda rows: self._round_seconds(num_micro_batches, in_round, rows - num_decodes),
            num_micro_batches,
        )

    def _round_seconds(self, num_micro_batches: int, num_decodes: int, num_drafted: int) -> float:
        """Predicted seconds of a round with ``num_drafted`` drafted tokens per micro-batch: startup measurements plus learned overhead."""
        seconds = self._draft_time(num_micro_batches, num_decodes, num_drafted)
        return max(MIN_TIME_RATIO * seconds, seconds + self._overheads.seconds(num_decodes, num_drafted))

    def record_round(self, plan: BatchPlan, sequences: list[Sequence], num_in_flight: int) -> None:
        """Learn the overhead of a round (one step of every micro-batch). The round's time is estimated as the time since the
        previous result, times ``num_in_flight``."""
        if not self._chooses_lengths or self.proposer is None:
            return
        now = self._clock()
        begin, self._last_result = self._last_result, now
        drafting, self._seconds_since = self._seconds_since, 0.0
        if begin is None or plan.num_decodes < len(plan.entries):
            return
        if any(sequence.num_in_flight > 1 for sequence in sequences):  # draft-only chunks do not form rounds
            return
        num_drafted = plan.num_samples - len(plan.entries)
        if self._uses_mtp and bool(num_drafted) != any(entry.num_drafts for entry in plan.entries):
            return  # rounds measured at startup both verify drafts and make the next ones
        num_decodes = num_in_flight * len(plan.entries)
        seconds = num_in_flight * (now - begin - drafting)
        expected = self._draft_time(num_in_flight, num_decodes, num_drafted)
        self._overheads.add(num_decodes, num_drafted, seconds - expected)

    def on_idle(self) -> None:
        """Forget the time of the last result: idle time belongs to no round."""
        self._last_result = None

    def _take_blocks(self, sequence: Sequence, count: int, num_chosen: int) -> bool:
        """Allocate blocks for ``count`` drafted tokens after the ``num_chosen`` scheduled tokens, and save the state.
        Returns whether there is room."""
        cache = sequence.cache
        if not count or self._tables.draft_limit(cache) == 0 or not self._tables.reserve(cache, count):
            return False
        self._tables.save_state(cache, cache.num_tokens - num_chosen)
        self._tables.advance(cache, sequence.token_ids, count)
        return True

    def _limit(self, sequence: Sequence, *limits: int) -> int:
        """Maximum draft length of a sequence, at most the smallest of ``limits``; 0 if it has unscheduled tokens."""
        if not sequence.may_draft or sequence.num_unscheduled:
            return 0
        limit = self._tables.draft_limit(sequence.cache)
        return min(
            *limits,
            *([] if limit is None else [limit]),
            self._max_tokens,
            sequence.max_context - sequence.cache.num_tokens,
            sequence.max_tokens - sequence.num_output_tokens - len(sequence.draft) - 1,
        )

    def _propose(self, limits: dict[Sequence, int]) -> list[list[int]]:
        """Call the proposer; drafts are empty if it fails."""
        try:
            with ExitStack() as stack:
                for sequence in limits:
                    stack.enter_context(sequence.with_draft_applied())
                lengths = [len(sequence.token_ids) for sequence in limits]
                proposals = [list(draft) for draft in self.proposer.propose(list(limits), list(limits.values()))]
                lengths_after = [len(sequence.token_ids) for sequence in limits]
            if len(proposals) != len(limits):
                raise ValueError(f"{len(proposals)} drafts for {len(limits)} sequences")
            for token in (token for proposed in proposals for token in proposed):
                if type(token) is not int or not 0 <= token < self._vocab_size:
                    raise ValueError(f"{token!r:.60} is not a token id (vocabulary of {self._vocab_size})")
        except (PeerLost, WaitTimeout):
            raise  # the rank of a remote drafter is lost
        except Exception as error:  # noqa: BLE001 - a plugin's proposer may raise anything, and no answer needs drafts
            self._switch_off(error)
            return [[] for _ in limits]
        assert lengths_after == lengths, f"{type(self.proposer).__name__} modified a sequence"
        return proposals

    def _switch_off(self, error: Exception) -> None:
        name = type(self.proposer).__name__
        logger.warning(
            "speculative decoding is off for the rest of this run: %s failed: %s: %s: %s",
            name,
            locate(error, source_path(type(self.proposer))),
            type(error).__name__,
            first_line(error),
        )
        logger.debug("%s failed", name, exc_info=error)
        self.counts["drafter_failures"] += 1
        self.proposer = None

    def record_verified(self, sequence: Sequence, positions: tuple[int, ...], num_accepted: int) -> None:
        """Count accepted tokens, and remove rejected ones from the KV cache and the state."""
        num_drafted = len(positions) - len(sequence.draft)
        if not num_drafted:
            return
        num_rejected = num_drafted - num_accepted
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        self.counts["accepted"] += num_accepted
        self.counts["saved_seconds"] += num_accepted * self._token_seconds
        for position in positions[:num_accepted]:
            self.counts[f"accepted_{position}"] += 1
        self._lengths.add_verified(sequence, positions[:num_drafted], num_accepted)
        if num_rejected:
            self._tables.truncate(sequence.cache, sequence.cache.num_tokens - num_rejected)
        else:
            self._tables.drop_saved(sequence.cache)

    def forget(self, sequences: list[Sequence]) -> None:
        """Drop the state kept for sequences that have ended, also the proposer's."""
        self._lengths.forget(sequences)
        self._asked_before.difference_update(sequences)
        if self.proposer is not None:
            try:
                self.proposer.forget(sequences)
            except Exception as error:  # noqa: BLE001 - as in ``_propose``
                self._switch_off(error)
