"""The scheduler: continuous batching over micro-batches in flight.

``schedule`` composes the next micro-batch or returns None; ``update`` takes the tokens of one that came back. Neither
blocks. Decodes go first; what is left of the token budget goes to prompts, in chunks (Agrawal et al. 2023,
arXiv:2308.16369). A prompt may have several chunks in flight. Who comes first, and how much of each kind of work a
micro-batch gets, is for ``policies`` to say.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass

from labinfer.config import SchedulerOptions
from labinfer.engine.block_manager import BlockManager, extend_chain
from labinfer.engine.pipeline_schedule import make_schedule
from labinfer.engine.policies import ORDERS, SPLITS, Load, Rank, Split, balanced
from labinfer.engine.sequence import FinishReason, Sequence
from labinfer.plan import NO_TOKEN, BatchEntry, BatchPlan, BatchResult, SequenceStart, TokenLogprobs


@dataclass(frozen=True)
class InFlight:
    """A micro-batch on its way: its plan, and the sequence of each entry."""

    plan: BatchPlan
    sequences: list[Sequence]


class Scheduler:
    """Sequences wait, run and finish here.

    Args:
        options: the budgets.
        blocks: the KV blocks, the same number on every rank.
        num_stages: pipeline stages.
        eos_token_ids: tokens that end a sequence unless it ignores them.
    """

    def __init__(
        self, options: SchedulerOptions, blocks: BlockManager, num_stages: int, eos_token_ids: tuple[int, ...] = ()
    ):
        self._options = options
        self._blocks = blocks
        self._schedule = make_schedule(options.pipeline_schedule, options.max_inflight or num_stages)
        self._order, self._split = ORDERS[options.scheduling_policy], SPLITS[options.batch_policy]
        self._was_prefilling = False
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Sequence] = []  # by rank
        self.running: list[Sequence] = []  # by rank
        self.in_flight: deque[InFlight] = deque()
        self._finished_ids: list[int] = []
        self._next_step_id = 0
        self.num_preemptions = 0
        self.num_looked_up = self.num_found = 0
        """Tokens of admitted sequences, and how many of them were in the cache."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @property
    def max_queued(self) -> int:
        """Sequences that may wait, 0 for any number."""
        return self._options.max_queued_requests

    def has_room(self, count: int) -> bool:
        """Whether so many more may wait."""
        return not self.max_queued or len(self.waiting) + count <= self.max_queued

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self._rank)

    def schedule(self) -> BatchPlan | None:
        """The next micro-batch, or None when nothing can start now. Never blocks."""
        if not self._schedule.may_launch(len(self.in_flight)):
            return None
        chosen = self._compose(self._split)
        if not chosen and not self.in_flight:  # the policy would wait for what will not come
            chosen = self._compose(balanced)
        if not chosen:
            return None
        self._was_prefilling = any(not sequence.is_decoding for sequence, _ in chosen)
        return self._make_plan(chosen)

    def update(self, result: BatchResult) -> list[Sequence]:
        """Take the tokens of the oldest micro-batch in flight. Returns the sequences that got one."""
        batch = self.in_flight.popleft()
        assert batch.plan.step_id == result.step_id, (
            f"step {result.step_id} came back, but {batch.plan.step_id} was awaited"
        )
        tokens, values = iter(result.token_ids), iter(result.values)
        advanced = []
        for entry, sequence in zip(batch.plan.entries, batch.sequences, strict=True):
            sequence.num_in_flight -= 1
            token = next(tokens) if entry.sample else None
            numbers = list(itertools.islice(values, entry.num_values))
            if sequence.finish_reason is not None:  # it was aborted meanwhile
                continue
            if numbers:
                sequence.take_values(numbers, token)
            if token is not None:
                self._append(sequence, token)
                advanced.append(sequence)
        return advanced

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now and free its blocks.

        A micro-batch in flight may still write to them; that does no harm, as every stage runs plans in order and a
        later owner's writes come after.
        """
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def take_finished_ids(self) -> list[int]:
        """Sequences that the workers have not been told to forget yet."""
        finished, self._finished_ids = self._finished_ids, []
        return finished

    def describe(self, plan: BatchPlan) -> str:
        """A step in one line, for the log."""
        decodes = sum(entry.num_tokens == 1 and entry.sample for entry in plan.entries)
        return (
            f"step {plan.step_id}: {plan.num_tokens} tokens ({decodes} decodes, {len(plan.entries) - decodes} chunks), "
            f"{len(self.running)} running, {len(self.waiting)} waiting, {self._blocks.num_free} blocks free, "
            f"{self.num_preemptions} preempted"
        )

    # How a micro-batch is composed.

    def _compose(self, split: Split) -> list[tuple[Sequence, int]]:
        """Sequences and how many of their tokens to run."""
        chosen: list[tuple[Sequence, int]] = []
        preemptions_before = self.num_preemptions
        decoding = [s for s in self.running if s.is_decoding or (s.num_in_flight and s.num_unscheduled == 0)]
        budget = split(self._load(len(decoding)))
        limit = min(budget.num_decodes, self._options.max_num_batched_tokens)
        num_decodes = self._choose_decodes(chosen, decoding, limit)
        room = min(budget.num_prefill_tokens, self._options.max_num_batched_tokens - num_decodes)
        room -= self._choose_prefills(chosen, room)
        if self.num_preemptions == preemptions_before:  # no room for those who run is no room for others
            self._admit(chosen, room)
        return chosen

    def _load(self, num_decoding: int) -> Load:
        prefill_tokens = sum(s.num_unscheduled for s in self.running if not s.is_decoding)
        next_fits = self.waiting and self._blocks.blocks_for(len(self.waiting[0].token_ids)) <= self._blocks.num_free
        if next_fits and len(self.running) < self._options.max_num_seqs:
            prefill_tokens += sum(len(s.token_ids) for s in self.waiting)
        return Load(
            num_decoding=num_decoding,
            prefill_tokens=prefill_tokens,
            free_fraction=self._blocks.num_free / max(1, self._blocks.num_blocks),
            num_micro_batches=self._schedule.num_micro_batches,
            max_tokens=self._options.max_num_batched_tokens,
            was_prefilling=self._was_prefilling,
        )

    def _choose_decodes(self, chosen: list[tuple[Sequence, int]], decoding: list[Sequence], budget: int) -> int:
        used = 0
        for sequence in decoding:
            if used == budget:
                break
            # Looked at again: another sequence may have taken this one's blocks a moment ago.
            if sequence.is_decoding and self._grow(sequence):
                self._choose(chosen, sequence, 1)
                used += 1
        return used

    def _choose_prefills(self, chosen: list[tuple[Sequence, int]], budget: int) -> int:
        used = 0
        for sequence in self.running:
            count = min(sequence.num_unscheduled, budget - used, self._options.chunked_prefill_size)
            if count > 0 and not sequence.is_decoding:
                self._choose(chosen, sequence, count)  # its blocks were all allocated when it was admitted
                used += count
        return used

    def _admit(self, chosen: list[tuple[Sequence, int]], budget: int) -> None:
        limit = self._options.max_num_seqs
        if not self.waiting or budget <= 0 or len(self.running) >= limit:
            return
        queues: dict[str, deque[Sequence]] = {}
        for sequence in self.waiting:  # in the order of their ranks, so that only each user's first can be next
            queues.setdefault(sequence.request.user, deque()).append(sequence)
        running_of_user = Counter(sequence.request.user for sequence in self.running)
        while queues and budget > 0 and len(self.running) < limit:
            heads = (queue[0] for queue in queues.values())
            sequence = min(heads, key=lambda head: self._order(head, running_of_user))
            if not self._take_blocks(sequence):
                return
            user = sequence.request.user
            queues[user].popleft()
            if not queues[user]:
                del queues[user]
            running_of_user[user] += 1
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=self._rank)
            count = min(sequence.num_unscheduled, budget, self._options.chunked_prefill_size)
            self._choose(chosen, sequence, count)
            budget -= count

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens; those the cache knows are shared, and their tokens count as run."""
        num_tokens, size = len(sequence.token_ids), self._blocks.block_size
        found = []
        if sequence.token_sampling.prompt_logprobs is None:  # they take running the prompt
            found = self._blocks.find(self._digests(sequence, (num_tokens - 1) // size))  # the last token is always run
        blocks = self._blocks.share(found, self._blocks.blocks_for(num_tokens) - len(found))
        if blocks is None:
            return False
        sequence.block_table = blocks
        sequence.num_registered = len(found)
        sequence.num_scheduled = len(found) * size
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_scheduled
        self.num_looked_up += num_tokens
        self.num_found += sequence.num_scheduled
        return True

    def _digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Of its first full blocks; none where nothing is to be found."""
        if not self._blocks.prefix_caching:
            return []
        extend_chain(
            sequence.digests, sequence.token_ids, self._blocks.block_size, sequence.request.cache_salt, num_blocks
        )
        return sequence.digests[:num_blocks]

    def _choose(self, chosen: list[tuple[Sequence, int]], sequence: Sequence, count: int) -> None:
        """Run the next ``count`` tokens of a sequence in this step; others can find the blocks they fill.

        At once: whoever finds them runs in this step or a later one, and every stage runs steps in order, in each layer
        writing keys and values before it reads any.
        """
        chosen.append((sequence, count))
        full = (sequence.num_scheduled + count) // self._blocks.block_size
        if full == sequence.num_registered:
            return
        filled = zip(sequence.block_table, self._digests(sequence, full), strict=False)
        for block, digest in itertools.islice(filled, sequence.num_registered, None):
            self._blocks.register(block, digest)
        sequence.num_registered = full

    def _grow(self, sequence: Sequence) -> bool:
        """Room for one more token, taken from the last sequence at rest where no block is free.

        Only those of higher rank give way, so the first always goes on: with nobody to take from, waiting is enough.
        """
        while self._blocks.blocks_for(sequence.num_scheduled + 1) > len(sequence.block_table):
            blocks = self._blocks.allocate(1)
            if blocks is None:
                victim = next(
                    (
                        s
                        for s in reversed(self.running)
                        if s.num_in_flight == 0 and self._rank(s) > self._rank(sequence)
                    ),
                    None,
                )
                if victim is None:
                    return False
                self._preempt(victim)
                continue
            sequence.block_table += blocks
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Back to waiting, to be computed again from its token ids."""
        self.running.remove(victim)
        self._release(victim)
        victim.forget_cache()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, victim, key=self._rank)

    def _make_plan(self, chosen: list[tuple[Sequence, int]]) -> BatchPlan:
        starts, entries = [], []
        for sequence, count in chosen:
            if not sequence.started:
                starts.append(
                    SequenceStart(
                        sequence.seq_id, list(sequence.token_ids), sequence.num_scheduled, sequence.token_sampling
                    )
                )
                sequence.started, sequence.pending_token = True, NO_TOKEN
            wanted = sequence.token_sampling
            num_values = sequence.num_prompt_measures(count) * TokenLogprobs.count(wanted.prompt_logprobs)
            sequence.num_scheduled += count
            sequence.num_in_flight += 1
            sample = sequence.num_unscheduled == 0
            num_values += sample * TokenLogprobs.count(wanted.logprobs)
            new_blocks = sequence.block_table[sequence.num_blocks_sent :]
            entries.append(BatchEntry(sequence.seq_id, count, new_blocks, sequence.pending_token, sample, num_values))
            sequence.num_blocks_sent, sequence.pending_token = len(sequence.block_table), NO_TOKEN
        plan = BatchPlan(self._next_step_id, starts, self.take_finished_ids(), entries)
        self._next_step_id += 1
        self.in_flight.append(InFlight(plan, [sequence for sequence, _ in chosen]))
        return plan

    def _release(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.block_table)
        sequence.block_table = []
        if sequence.started:
            self._finished_ids.append(sequence.seq_id)

    def _rank(self, sequence: Sequence) -> Rank:
        """Among those who run; it never changes."""
        return self._order(sequence, {})

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.token_ids.append(token)
        sequence.pending_token = token
        is_eos = token in self.eos_token_ids and not sequence.sampling.ignore_eos
        if is_eos or token in sequence.sampling.stop_token_ids:
            self.finish(sequence, FinishReason.STOP)
        elif sequence.num_output_tokens >= sequence.max_tokens:
            self.finish(sequence, FinishReason.LENGTH)
