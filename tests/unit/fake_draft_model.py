"""``FakeDraftModel``: a draft model that knows the answers, and what it must have been told for each."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from worker_model import WRONG_TOKEN, token_at

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.plan import BatchEntry, BatchPlan, BatchResult, EntryResult

BLOCK = 4


@dataclass
class FakeDraftModel:
    """Knows what the model samples, gets some of it wrong, and checks that all it sees of a sequence is in its blocks."""

    num_blocks: int = 64
    max_model_len: int = 200
    num_states: int = 0
    share: float = 1.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    plans: list[BatchPlan] = field(default_factory=list)
    known: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    cells: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    slots: dict[int, int] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)

    @property
    def sizes(self) -> CacheSizes:
        return CacheSizes(num_blocks=self.num_blocks, num_states=self.num_states, max_model_len=self.max_model_len)

    def run(self, plan: BatchPlan) -> BatchResult:
        self.plans.append(plan)
        assert plan.step_id == len(self.plans) - 1
        for seq_id in plan.finished:
            del self.known[seq_id], self.tables[seq_id]
        for start in plan.starts:
            assert start.seq_id not in self.known and start.sampling.logprobs is None
            self.known[start.seq_id], self.tables[start.seq_id] = list(start.token_ids), []
            self.slots[start.seq_id] = start.state_slot
        for move in plan.moves:
            for source, dest in zip(move.source, move.dest, strict=True):
                if move.kind == "copy_state":
                    self.states[dest] = self.states[source]
                else:
                    assert move.kind == "copy"
                    self.cells[dest] = dict(self.cells[source])
        for entry in plan.entries:
            self._write(entry)
        return BatchResult(plan.step_id, [self._sample(entry) for entry in plan.entries])

    def _write(self, entry: BatchEntry) -> None:
        tokens, table = self.known[entry.seq_id], self.tables[entry.seq_id]
        assert entry.begin == entry.position <= len(tokens) and len(entry.new_tokens) == entry.num_tokens
        tokens[entry.begin :] = entry.new_tokens
        table[entry.first_block :] = entry.new_blocks
        assert all(0 <= block < self.num_blocks for block in table)
        if self.num_states:
            slot = self.slots[entry.seq_id]
            assert 0 <= slot < self.num_states
            assert not entry.begin or self.states[slot] == hash(tuple(tokens[: entry.begin])), "a state of other tokens"
            self.states[slot] = hash(tuple(tokens))
        for index in range(entry.begin, len(tokens)):
            self.cells[table[index // BLOCK]][index % BLOCK] = hash(tuple(tokens[: index + 1]))

    def _sample(self, entry: BatchEntry) -> EntryResult:
        tokens, table = self.known[entry.seq_id], self.tables[entry.seq_id]
        assert len(tokens) <= self.max_model_len
        for index in range(len(tokens)):
            assert self.cells[table[index // BLOCK]][index % BLOCK] == hash(tuple(tokens[: index + 1])), index
        if not entry.num_samples:
            return EntryResult()
        right = self.draw.random() < self.share or entry.masks
        return EntryResult((token_at(entry.seq_id, len(tokens)) if right else WRONG_TOKEN,))
