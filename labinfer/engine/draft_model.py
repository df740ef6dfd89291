"""DraftModelProposer: drafts of a smaller model, sampled with the random numbers of the sequence that they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.plan import NO_SLOT, NO_TOKEN, BatchEntry, BatchPlan, BatchResult, SequenceStart
from labinfer.engine.block_table import SequenceCache
from labinfer.engine.block_tables import BlockTables
from labinfer.engine.guide import allows
from labinfer.engine.sequence import Sequence


class DraftModel(Protocol):
    """Draft model with KV blocks of its own."""

    sizes: CacheSizes
    """Numbers of the draft model's KV blocks and state slots."""

    def run(self, plan: BatchPlan) -> BatchResult:
        """Run the tokens of a plan and sample the next token of each entry that asks for one."""
        ...


@dataclass(eq=False, kw_only=True)
class DraftedSequence:
    """State of a sequence in the draft model's KV cache."""

    cache: SequenceCache
    tail: list[int] = field(default_factory=list)
    """Last tokens in the draft model's cache, not yet verified when they were run (drafted by this or another proposer)."""
    started: bool = False
    """Whether the draft model's runner knows the sequence."""

    def num_matching(self, token_ids: list[int]) -> int:
        """Number of leading tokens in the draft model's cache that equal those of ``token_ids``. The last one of
        ``token_ids`` never counts: it is run to sample the next token."""
        num_matching = min(self.cache.num_tokens - len(self.tail), len(token_ids) - 1)
        for drafted, token in zip(self.tail, token_ids[num_matching:-1], strict=False):
            if drafted != token:
                break
            num_matching += 1
        return num_matching


@dataclass(eq=False, kw_only=True)
class Draft:
    """A draft that is being made for one sequence."""

    sequence: Sequence
    drafted: DraftedSequence
    limit: int
    tokens: list[int] = field(default_factory=list)
    is_complete: bool = False
    num_accepted: int = 0
    """Number of drafted tokens by which the sequence's guide was advanced; rolled back when drafting ends."""

    def take(self, token: int, ends: frozenset[int]) -> None:
        """Append a sampled token, or complete the draft if the answer ends with that token."""
        if token == NO_TOKEN:
            self.is_complete = True
            return
        guide = self.sequence.guide
        if guide is not None and token not in ends:
            assert allows(guide.mask, token), f"the draft model sampled {token}, which its mask forbids"
            guide.accept(token)
            self.num_accepted += 1
        if token in ends or (guide is not None and not guide.mask):
            self.is_complete = True
            return
        self.tokens.append(token)
        self.is_complete = len(self.tokens) == self.limit


class DraftModelProposer:
    """Drafts with another model of the same vocabulary, in one batched step over all sequences per drafted token.

    A token is drafted as the engine would sample it from the target model: with the request's logits processors, mask
    and temperature, and the random numbers of its seed at that position. If both models predict similar distributions,
    equal random numbers make them choose equal tokens (Daliri, Musco & Suresh 2024, arXiv:2408.07978).

    The draft model has its own KV cache. Rejected tokens are overwritten there. Tokens that the draft model has not seen are run in
    one chunk that ends with the sequence's last token, after which the first drafted token is sampled. A recurrent state is rolled
    back to before the first drafted token.

    Args:
        model: the draft model; no token is drafted beyond its context length.
        tables: pools of the draft model's own KV blocks and states.
        max_tokens: maximum number of tokens in a step of the draft model. Longer prompts take several steps, one per
            ``propose``.
        eos_token_ids: ids that end an answer unless its request ignores them.
    """

    def __init__(self, model: DraftModel, tables: BlockTables, max_tokens: int, eos_token_ids: Iterable[int]):
        self._model, self.tables = model, tables
        self._max_tokens, self._eos_token_ids = max_tokens, frozenset(eos_token_ids)
        self._drafted: dict[int, DraftedSequence] = {}  # by ``seq_id``, least recently used first
        self._finished: list[int] = []
        self._next_step_id = 0
        self.counts: Counter[str] = Counter()
        """Counters since the start: steps, evicted (sequences whose blocks were freed for others), crowded_out (drafts
        skipped for lack of blocks or state slots)."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Draft at most ``limits[i]`` tokens for ``sequences[i]``."""
        drafts: dict[int, Draft] = {}
        asking = {sequence.seq_id for sequence in sequences}
        for sequence, limit in zip(sequences, limits, strict=True):
            limit = min(limit, self._model.sizes.max_model_len + 1 - len(sequence.token_ids))
            if sequence.num_unverified and self.tables.states is not None:
                continue  # a state can be rolled back to the last verified token only
            if limit > 0 and (drafted := self._make_room(sequence, limit, asking)) is not None:
                drafts[sequence.seq_id] = Draft(sequence=sequence, drafted=drafted, limit=limit)
        try:
            active = [draft for draft in self._catch_up(list(drafts.values())) if self._save_state(draft)]
            while active:
                active = self._step([(draft, draft.tokens[-1:]) for draft in active])
        finally:
            for draft in drafts.values():
                if draft.num_accepted:
                    draft.sequence.guide.rollback(draft.num_accepted)
        return [drafts[sequence.seq_id].tokens if sequence.seq_id in drafts else [] for sequence in sequences]

    def forget(self, sequences: list[Sequence]) -> None:
        """Free the blocks of sequences that have ended."""
        for sequence in sequences:
            if sequence.seq_id in self._drafted:
                self._release(sequence.seq_id)

    def _make_room(self, sequence: Sequence, limit: int, asking: set[int]) -> DraftedSequence | None:
        """Allocate blocks for a sequence's tokens and a draft of ``limit`` tokens. Evicts sequences whose ids are not in ``asking``;
        returns None without room."""
        drafted = self._drafted.pop(sequence.seq_id, None) or DraftedSequence(
            cache=SequenceCache(salt=sequence.cache.salt)
        )
        self._drafted[sequence.seq_id] = drafted
        cache, tokens = drafted.cache, sequence.token_ids
        if (num_matching := drafted.num_matching(tokens)) < cache.num_tokens:
            self.tables.truncate(cache, num_matching)
        else:
            self.tables.drop_saved(cache)
        while not (
            (cache.blocks or self.tables.admit(cache, tokens, len(tokens)))
            and self.tables.reserve(cache, len(tokens) + limit - 1 - cache.num_tokens)
        ):
            victim = next((seq_id for seq_id in self._drafted if seq_id not in asking), sequence.seq_id)
            self._release(victim)
            if victim == sequence.seq_id:
                self.counts["crowded_out"] += 1
                return None
            self.counts["evicted"] += 1
        drafted.tail = tokens[len(tokens) - sequence.num_unverified : cache.num_tokens]  # prefix-cache hits included
        return drafted

    def _release(self, seq_id: int) -> None:
        drafted = self._drafted.pop(seq_id)
        self.tables.release(drafted.cache)
        if drafted.started:
            self._finished.append(seq_id)

    def _save_state(self, draft: Draft) -> bool:
        """Save the recurrent state before drafted tokens change it. Returns False if no slot is free."""
        if self.tables.draft_limit(cache := draft.drafted.cache) == 0:
            self.counts["crowded_out"] += 1
            return False
        self.tables.save_state(cache, cache.num_tokens)
        return True

    def _catch_up(self, drafts: list[Draft]) -> list[Draft]:
        """Run the tokens that the draft model has not seen, up to ``max_tokens``. Returns the drafts to continue."""
        chunks, left = [], self._max_tokens
        for draft in drafts:
            missing = draft.sequence.token_ids[draft.drafted.cache.num_tokens :][:left]
            left -= len(missing)
            if missing:
                chunks.append((draft, missing))
        return self._step(chunks) if chunks else []

    def _step(self, chunks: list[tuple[Draft, list[int]]]) -> list[Draft]:
        """Run the tokens of ``chunks``, and sample the next token of each sequence all of whose tokens have then run. Returns
        the drafts to continue."""
        starts, entries = [], []
        for draft, tokens in chunks:
            sequence, drafted = draft.sequence, draft.drafted
            if not drafted.started:
                starts.append(_make_start(sequence, drafted.cache))
                drafted.started = True
            entries.append(self._make_entry(draft, tokens))
        plan = BatchPlan(
            step_id=self._next_step_id,
            starts=starts,
            finished=self._finished,
            moves=self.tables.take_moves(),
            entries=entries,
        )
        self._next_step_id += 1
        self._finished = []
        self.counts["steps"] += 1
        active = []
        for (draft, _), entry, result in zip(chunks, entries, self._model.run(plan).entries, strict=True):
            if entry.num_samples:
                draft.take(result.token_ids[0], draft.sequence.request.ends(self._eos_token_ids))
                if not draft.is_complete:
                    active.append(draft)
        return active

    def _make_entry(self, draft: Draft, tokens: list[int]) -> BatchEntry:
        sequence, cache = draft.sequence, draft.drafted.cache
        begin = cache.num_tokens
        self.tables.advance(cache, sequence.token_ids, len(tokens))
        num_certain = len(sequence.token_ids) - sequence.num_unverified
        draft.drafted.tail += tokens[max(0, num_certain - begin) :]
        samples = cache.num_tokens >= len(sequence.token_ids)
        first_block, cache.num_known = cache.num_known, len(cache.blocks)
        return BatchEntry(
            seq_id=sequence.seq_id,
            num_tokens=len(tokens),
            begin=begin,
            position=begin,
            first_block=first_block,
            new_blocks=cache.blocks[first_block:],
            new_tokens=tuple(tokens),
            num_samples=int(samples),
            masks=(sequence.guide.mask,) if samples and sequence.guide is not None else (),
            is_decode=samples and len(tokens) == 1,
        )


def _make_start(sequence: Sequence, cache: SequenceCache) -> SequenceStart:
    """Make the start entry of a sequence for the draft model: the request's sampling parameters, without logprobs."""
    sampling = msgspec.structs.replace(sequence.token_sampling, logprobs=None, prompt_logprobs=None)
    slot = NO_SLOT if cache.state_slot is None else cache.state_slot
    return SequenceStart(sequence.seq_id, sequence.token_ids[: cache.num_tokens], sampling, slot)
