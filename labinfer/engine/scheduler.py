"""Scheduler: continuous batching over micro-batches in flight.

``schedule`` composes the next micro-batch or returns None; ``update`` processes the result of one. Neither blocks.
Decodes are scheduled first; the rest of the token budget goes to prompts, in chunks (Agrawal et al. 2023,
arXiv:2308.16369). A prompt may have several chunks in flight. ``policies`` decide the order of sequences, and how much
of each kind of work a micro-batch gets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from labinfer.base.config import SchedulerOptions
from labinfer.base.plan import WHOLE_PROMPT_POOLINGS, BatchPlan, BatchResult
from labinfer.base.rank_stats import StepTimes
from labinfer.base.registry import REGISTRY
from labinfer.engine.block_tables import BlockTables
from labinfer.engine.micro_batches import MicroBatchCount
from labinfer.engine.pipeline_schedule import PipelineSchedule
from labinfer.engine.plan_entries import make_entry, make_start, max_result_bytes
from labinfer.engine.policies import BatchPolicy, Budget, SchedulerState, balanced, resolve_batch_policy
from labinfer.engine.queues import RequestQueues
from labinfer.engine.request import FinishReason
from labinfer.engine.sequence import Sequence
from labinfer.engine.speculation import Speculation


@dataclass(frozen=True)
class InFlight:
    """Micro-batch in flight: its plan, and the sequence of each entry."""

    plan: BatchPlan
    sequences: list[Sequence]


class Scheduler:
    """Schedules sequences from arrival to end: admits, composes micro-batches, preempts and finishes.

    Args:
        options: scheduler options, with the token budgets.
        tables: block tables over the KV blocks; all ranks have equally many.
        num_stages: pipeline stages.
        micro_batches: chooses the number of micro-batches.
        drafts: adds drafted tokens and records their acceptance.
        eos_token_ids: ids that end a sequence unless its request ignores them.
        times: measured step times; None without measurements.
        whole_prompts: schedule each prompt in one step, ignoring ``chunked_prefill_size`` (bidirectional attention).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        tables: BlockTables,
        num_stages: int,
        *,
        micro_batches: MicroBatchCount,
        drafts: Speculation,
        eos_token_ids: tuple[int, ...] = (),
        times: StepTimes | None = None,
        whole_prompts: bool = False,
        clock: Callable[[], float],
    ):
        self._options = options
        self._tables, self._blocks = tables, tables.blocks
        self._schedule: PipelineSchedule = REGISTRY.find("pipeline_schedule", options.pipeline_schedule)()
        self._micro_batches = micro_batches
        self._batch_policy = resolve_batch_policy(options.batch_policy, num_stages, self._schedule.has_steady_state)
        self._times = times
        self._whole_prompts = whole_prompts
        self._chunk_size = options.max_num_batched_tokens if whole_prompts else options.chunked_prefill_size
        self._is_prefilling = self._was_prefilling = False
        self.eos_token_ids = frozenset(eos_token_ids)
        self.queues = RequestQueues(
            REGISTRY.find("scheduling_policy", options.scheduling_policy),
            options.max_num_seqs,
            clock,
            **REGISTRY.entry("scheduling_policy", options.scheduling_policy).details,
        )
        self.in_flight: deque[InFlight] = deque()
        self._finished_ids: list[int] = []
        self.next_step_id = 0
        """Id of the next micro-batch; ids continue across runs."""
        self.drafts = drafts
        self.counts = drafts.counts
        """Counters since the start: preemptions, swaps (preemptions by swapping), looked_up (tokens of admitted
        sequences), found (looked-up tokens that the prefix cache had), and the counters of ``drafts``."""

    @property
    def tables(self) -> BlockTables:
        """Block tables over all KV blocks."""
        return self._tables

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences, by sort key of the scheduling policy."""
        return self.queues.waiting

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, by sort key of the scheduling policy."""
        return self.queues.running

    @property
    def max_queued(self) -> int:
        """Maximum length of the waiting queue; 0 for no limit."""
        return self._options.max_queued_requests

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more sequences fit in the waiting queue."""
        return not self.max_queued or len(self.waiting) + count <= self.max_queued

    def add(self, sequence: Sequence) -> None:
        if self._options.context_shift:
            self._tables.reserve_for_shift(sequence.cache, sequence.max_context - self.shifted(sequence.max_context)[1])
        self.queues.enqueue(sequence)

    def schedule(self) -> BatchPlan | None:
        """Compose the next micro-batch; None if nothing can start now. Never blocks."""
        if not self._schedule.may_launch(len(self.in_flight), self._micro_batches_now()):
            assert self.in_flight, (
                f"the pipeline schedule {type(self._schedule).__name__} starts no micro-batch although none is in "
                "flight (see engine/pipeline_schedule.py)"
            )
            return None
        chosen = self._compose(self._batch_policy)
        while not chosen and not self.in_flight:
            # The batch policy has chosen nothing although nothing is in flight, or beams that wait for each other hold all blocks.
            chosen = self._compose(balanced)
            stuck = next(self.queues.candidates(), None)
            if not chosen and not (stuck and self._preempt_for(stuck)):
                break
        if not chosen:
            assert self.in_flight or not self.has_work, (
                f"the scheduler is stuck, with no micro-batch in flight: {len(self.running)} sequences run and "
                f"{len(self.waiting)} wait, with {self._blocks.num_free} free KV blocks"
            )
            return None
        self._was_prefilling = self._is_prefilling
        return self._make_plan(chosen)

    def update(self, result: BatchResult) -> list[Sequence]:
        """Process the result of the oldest micro-batch in flight.

        Returns the sequences that got tokens or a vector; for beams the first member, once all beams have their tokens.
        """
        batch = self.in_flight.popleft()
        assert batch.plan.step_id == result.step_id, (
            f"step {result.step_id} arrived, but step {batch.plan.step_id} was expected"
        )
        self.drafts.record_round(batch.plan, batch.sequences, 1 + len(self.in_flight))
        advanced = []
        for entry, sequence, brought in zip(batch.plan.entries, batch.sequences, result.entries, strict=True):
            assert len(brought.token_ids) == entry.num_samples, f"step {result.step_id} sampled other rows than planned"
            sequence.num_in_flight -= 1
            if sequence.finish_reason is not None:  # the sequence was aborted meanwhile
                continue
            if sequence.num_results_to_discard:
                sequence.num_results_to_discard -= 1
                continue
            sequence.prompt_logprobs += brought.prompt_logprobs
            if brought.vector:
                sequence.embedding = list(brought.vector)
                self.finish(sequence, FinishReason.STOP)
                advanced.append(sequence)
            elif (group := sequence.group) is not None:
                if brought.token_ids and group.take(sequence, brought):
                    if (reason := group.advance()) is not None:
                        self.finish(group.members[0], reason)
                    advanced.append(group.members[0])
            elif brought.token_ids:
                sequence.mtp_draft = brought.draft
                places = sequence.draft_positions
                reason, num_right = sequence.extend(brought.token_ids, brought.logprobs, self.eos_token_ids)
                self.drafts.record_verified(sequence, places, num_right)
                if reason is not None:
                    self.finish(sequence, reason)
                advanced.append(sequence)
        if not self.has_work:
            self.drafts.on_idle()
        return advanced

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now, with all beams of its request, and free its blocks.

        A micro-batch in flight may still write to these blocks. That is safe: every stage runs plans in order, so a
        later owner writes after it.
        """
        if sequence.finish_reason is not None:
            return
        if sequence.group is not None:
            self.queues.end_group(sequence.group)
        members = sequence.group.members if sequence.group else [sequence]
        for member in members:
            member.finish_reason = reason
            self.withdraw(member)
            self._tables.release(member.cache)
        self.drafts.forget(members)

    def shifted(self, max_context: int) -> tuple[int, int]:
        """Range (begin, end) of positions that a context shift removes from a full context, in whole blocks."""
        blocks = self._blocks
        kept = blocks.tokens_in(blocks.blocks_for(self._options.keep))
        return kept, kept + blocks.tokens_in(max(1, blocks.full_blocks((max_context - kept) // 2)))

    def take_finished_ids(self) -> list[int]:
        """Take the ids of sequences that the workers must still be told to forget."""
        finished, self._finished_ids = self._finished_ids, []
        return finished

    def check_integrity(self) -> None:
        """Assert that the blocks in use are exactly the blocks of running and of swapped-out sequences."""
        self._tables.check_integrity(sequence.cache for sequence in [*self.running, *self.waiting])

    def describe(self, plan: BatchPlan) -> str:
        """Describe a step in one line, for the log."""
        decodes = plan.num_decodes
        return (
            f"step {plan.step_id}: {plan.num_tokens} tokens ({decodes} decodes, {len(plan.entries) - decodes} chunks), "
            f"{len(self.running)} running, {len(self.waiting)} waiting, {self._blocks.num_free} blocks free, "
            f"{self.counts['preemptions']} preempted"
        )

    # Composition of a micro-batch: ``chosen`` maps sequences to the number of their tokens to run.

    def _compose(self, policy: BatchPolicy) -> dict[Sequence, int]:
        chosen: dict[Sequence, int] = {}
        preemptions_before = self.counts["preemptions"]
        decoding, prefilling, on_their_way = [], [], []
        for sequence in self.running:
            if sequence.is_decoding:
                decoding.append(sequence)
            elif sequence.num_unscheduled:
                prefilling.append(sequence)
            elif not sequence.request.pooling:  # a pooled sequence samples no token
                on_their_way.append(sequence)
        budget = policy(self._state(len(decoding) + len(on_their_way), prefilling))
        assert isinstance(budget, Budget), (
            f"the batch policy {getattr(policy, '__name__', policy)!r} gave {budget!r:.60} (see engine/policies.py)"
        )
        left = self._options.max_num_batched_tokens
        left -= self._choose_from(decoding, chosen, left, budget.num_decodes)
        decodes = list(chosen)
        room = min(budget.num_prefill_tokens, left)
        if self._whole_prompts and room > 0:  # a smaller budget would starve the longest prompt
            room = left
        used = 0
        for sequence in self.queues.prompts(prefilling):
            if used == room:
                break
            # After a preemption there is no room for waiting sequences.
            if sequence.cache.blocks or (self.counts["preemptions"] == preemptions_before and self._admit(sequence)):
                used += self._choose(chosen, sequence, room - used)
        self._is_prefilling = len(chosen) > len(decodes)
        num_micro_batches = max(1, min(self._schedule.num_micro_batches(self._micro_batches_now()), len(self.running)))
        is_busy = chosen or decoding or prefilling or self.waiting
        self.drafts.propose(
            chosen,
            decodes=decodes,
            waiting=[] if is_busy else on_their_way,
            room=left - used,
            num_waiting=budget.num_decodes,
            eos_token_ids=self.eos_token_ids,
            num_micro_batches=num_micro_batches,
            num_in_flight=len(self.in_flight),
        )
        return chosen

    def _state(self, num_decoding: int, prefilling: list[Sequence]) -> SchedulerState:
        prefill_tokens = sum(sequence.num_unscheduled for sequence in prefilling)
        first = self.queues.next_waiting
        if first and self._tables.has_room(first.cache, first.num_positions) and self.queues.has_slot(first):
            prefill_tokens += sum(sequence.num_unscheduled for sequence in self.waiting)
        return SchedulerState(
            num_decoding=num_decoding,
            prefill_tokens=prefill_tokens,
            free_fraction=self._tables.free_fraction,
            num_micro_batches=self._schedule.num_micro_batches(self._micro_batches_now()),
            max_tokens=self._options.max_num_batched_tokens,
            was_prefilling=self._was_prefilling,
        )

    def _micro_batches_now(self) -> int:
        return self._micro_batches.best(len(self.running), bool(self.waiting) or self._was_prefilling)

    def _choose_from(
        self, sequences: list[Sequence], chosen: dict[Sequence, int], budget: int, most: int | None = None
    ) -> int:
        """Schedule tokens of ``sequences`` until ``most`` sequences are chosen or ``budget`` tokens are used. Returns
        the number of tokens."""
        used = 0
        for sequence in sequences:
            if used == budget or len(chosen) == most:
                break
            if sequence.cache.blocks:  # False if the sequence has just been preempted
                used += self._choose(chosen, sequence, budget - used)
        return used

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence if a slot and blocks for all its tokens are free. Tokens found in the prefix cache are not run."""
        if not self.queues.has_slot(sequence):
            return False
        was_swapped = bool(sequence.cache.host_blocks)
        find = not sequence.needs_all_prompt_outputs
        if not self._tables.admit(sequence.cache, sequence.token_ids, sequence.num_positions, find):
            return False
        if not was_swapped:
            self.counts["looked_up"] += len(sequence.token_ids)
            self._count_found(sequence, sequence.num_scheduled)
        self.queues.admit(sequence)
        return True

    def _count_found(self, sequence: Sequence, num_tokens: int) -> None:
        self.counts["found"] += num_tokens
        if not sequence.num_preemptions:
            in_prompt = sequence.num_prompt_tokens - sequence.num_cached_tokens
            sequence.num_cached_tokens += min(num_tokens, in_prompt)

    def _choose(self, chosen: dict[Sequence, int], sequence: Sequence, count: int) -> int:
        """Schedule up to ``count`` more tokens of a sequence in this step, within the chunk size and its context.

        If no block is free, the idle sequence with the largest sort key is preempted, if that key is larger than the
        key of ``sequence``. So the sequence with the smallest key always advances. Returns the number of scheduled
        tokens; 0 if the sequence must wait.
        """
        cache = sequence.cache
        while cache.num_tokens == sequence.max_context and not self._shift_context(sequence):
            if not self._preempt_for(sequence, chosen):
                return 0
        if self._whole_prompts and count < sequence.num_unscheduled:
            return 0
        count = min(count, sequence.num_unscheduled, self._chunk_size, sequence.max_context - cache.num_tokens)
        if (limit := self._tables.chunk_limit(cache)) is not None:
            count = min(count, limit)
        if not (sequence.is_decoding or sequence.needs_all_prompt_outputs):
            num_found = self._tables.reuse_newly_cached(cache, sequence.token_ids, sequence.num_positions)
            self._count_found(sequence, num_found)
            count = min(count, sequence.num_unscheduled, sequence.max_context - cache.num_tokens)
        while not self._tables.reserve(cache, count):
            if not self._preempt_for(sequence, chosen):
                return 0
        self._tables.advance(cache, sequence.token_ids, count)
        chosen[sequence] = count
        return count

    def _shift_context(self, sequence: Sequence) -> bool:
        """Shift the context: remove half of the tokens after the ``--keep`` first ones. Returns whether enough blocks were free."""
        return self._tables.shift(sequence.cache, *self.shifted(sequence.max_context))

    def _preempt_for(self, sequence: Sequence, chosen: Collection[Sequence] = ()) -> bool:
        """Preempt the idle sequence with the largest sort key above that of ``sequence``. Returns whether there was one."""
        victim = self.queues.victim(sequence, chosen)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _preempt(self, victim: Sequence) -> None:
        """Move a running sequence back to the waiting queue, swapped to host memory or to be recomputed from its token ids."""
        self.withdraw(victim)
        if self._prefers_swap(victim) and self._tables.swap_out(victim.cache):
            self.counts["swaps"] += 1
        else:
            self._tables.release(victim.cache)
            if victim.needs_all_prompt_outputs:
                victim.prompt_logprobs = []  # recomputed with the prompt
        victim.num_preemptions += 1
        self.counts["preemptions"] += 1
        self.queues.enqueue(victim)

    def _prefers_swap(self, victim: Sequence) -> bool:
        """Whether to swap rather than recompute: by ``preemption_mode``, or by the estimated times for ``auto``."""
        if victim.request.pooling in WHOLE_PROMPT_POOLINGS:
            return False  # the workers drop a pooled prompt's partial sum of hidden states
        mode, num_tokens = self._options.preemption_mode, victim.cache.num_tokens
        if mode != "auto" or self._times is None:
            return mode == "swap"
        swap = self._blocks.blocks_for(num_tokens) * self._times.swapped_block + self._times.swapped_state
        swap += len(victim.cache.windowed.in_use) * self._times.swapped_window_block
        return swap < victim.num_scheduled * self._times.per_token

    def _make_plan(self, chosen: dict[Sequence, int]) -> BatchPlan:
        starts = [make_start(sequence) for sequence in chosen if not sequence.started]
        entries = [make_entry(sequence, count) for sequence, count in chosen.items()]
        result_bytes = BatchResult.max_bytes(len(entries)) + sum(map(max_result_bytes, chosen, entries))
        plan = BatchPlan(
            step_id=self.next_step_id,
            starts=starts,
            finished=self.take_finished_ids(),
            moves=self._tables.take_moves(),
            entries=entries,
            result_bytes=result_bytes,
        )
        self.next_step_id += 1
        self.in_flight.append(InFlight(plan, list(chosen)))
        return plan

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence from the queues, and have the workers forget it."""
        self.queues.withdraw(sequence)
        if sequence.started:
            self._finished_ids.append(sequence.seq_id)
            sequence.started = False
