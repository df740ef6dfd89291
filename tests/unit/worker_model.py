"""A pure-Python model of what every worker does with plans: it keeps the picture and checks that it makes sense."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from labinfer.base.plan import BatchEntry, BatchPlan, BatchResult, CacheMove, EntryResult, TokenLogprobs, TokenSampling


def token_at(seq_id: int, position: int) -> int:
    """The token that the pretended model samples there: a pure function, as the real one's."""
    return (seq_id * 7919 + position * 104729) % 1000


WRONG_TOKEN = 1000
"""A token that is never right; also what is sampled behind wrong ones."""
VECTOR_SIZE = 3


def vector_of(token_ids: list[int]) -> list[float]:
    """What the pretended model makes of rows that are pooled: their number, sum and last one."""
    return [float(len(token_ids)), float(sum(token_ids)), float(token_ids[-1])]


def likely_tokens(token_ids: list[int], count: int) -> dict[int, float]:
    """The pretended model's likeliest next tokens, for beam search: a pure function of all tokens before."""
    draw = random.Random(str(token_ids))
    logprobs = sorted((-10 * draw.random() for _ in range(count)), reverse=True)
    return dict(zip(draw.sample(range(1000), count), logprobs, strict=True))


class Cell(NamedTuple):
    """What a slot holds: the keys and values of a token, seen from what was in the context when it ran."""

    history: int
    """Hash of the tokens up to it."""
    num_dropped: int
    """Tokens that had left the context when it ran."""
    position: int
    """What its key is rotated by."""


@dataclass
class KnownSequence:
    token_ids: list[int]
    sampling: TokenSampling
    state_slot: int
    block_table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)
    pooled_ids: list[int] = field(default_factory=list)
    """Those of its tokens that were run, where their mean is wanted."""


@dataclass(frozen=True)
class ContextShift:
    """Where the context ends, and what is done then."""

    context: int
    kept: int
    dropped: int

    def num_dropped(self, index: int) -> int:
        """Tokens that have left the context when the token with this index is run."""
        past = index - self.context
        return 0 if past < 0 else self.dropped * (past // self.dropped + 1)


class WorkerModel:
    """Applies plans as deltas, in order, and asserts that each can be carried out."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        shift: ContextShift,
        num_states: int = 0,
        num_host_states: int = 0,
        window: int = 0,
        num_window_blocks: int = 0,
        num_host_window_blocks: int = 0,
    ):
        self.num_blocks, self.block_size, self.num_host_blocks = num_blocks, block_size, num_host_blocks
        self.num_states, self.num_host_states = num_states, num_host_states
        self.states: dict[int, int] = {}
        """By slot: what went into the state there, as a hash of all tokens so far."""
        self.host_states: dict[int, int] = {}
        self.shift = shift
        self.sequences: dict[int, KnownSequence] = {}
        self.blocks: dict[int, dict[int, Cell]] = defaultdict(dict)
        self.host: dict[int, dict[int, Cell]] = {}
        self.window, self.num_window_blocks, self.num_host_window_blocks = (
            *(window, num_window_blocks),
            num_host_window_blocks,
        )
        self.window_blocks: dict[int, dict[int, Cell]] = defaultdict(dict)
        self.window_host: dict[int, dict[int, Cell]] = {}
        self.next_step_id = 0

    def run(self, plan: BatchPlan) -> BatchResult:
        assert plan.step_id == self.next_step_id, "steps are numbered without gaps"
        self.next_step_id += 1
        self.forget(plan.finished)
        for start in plan.starts:
            assert start.seq_id not in self.sequences, "a sequence is started twice"
            self.sequences[start.seq_id] = KnownSequence(list(start.token_ids), start.sampling, start.state_slot)
        assert plan.entries, "an empty plan was launched"
        names = [entry.seq_id for entry in plan.entries]
        assert len(names) == len(set(names)), "a sequence is twice in one micro-batch"
        for move in plan.moves:
            self._move(move)
        for entry in plan.entries:  # in every layer, all keys and values are written before any are read
            self._write(entry)
            if self.num_states:
                self._advance_state(entry)
        result = BatchResult(plan.step_id, [self._read(entry) for entry in plan.entries])
        data = result.encode()
        assert len(data) <= plan.result_bytes, "the result takes more bytes than there is room for"
        return BatchResult.decode(data)

    def _advance_state(self, entry: BatchEntry) -> None:
        """A state takes in every token once, in order."""
        known = self.sequences[entry.seq_id]
        assert 0 <= known.state_slot < self.num_states, "a sequence runs without a state"
        if entry.begin:
            before = hash(tuple(known.token_ids[: entry.begin]))
            assert self.states[known.state_slot] == before, f"sequence {entry.seq_id} has a state of other tokens"
        self.states[known.state_slot] = hash(tuple(known.token_ids[: entry.begin + entry.num_tokens]))

    def _move_state(self, move: CacheMove) -> None:
        source = self.host_states if move.kind == "swap_in_state" else self.states
        dest, limit = self.states, self.num_states
        if move.kind == "swap_out_state":
            dest, limit = self.host_states, self.num_host_states
        for taken, given in zip(move.source, move.dest, strict=True):
            assert 0 <= given < limit
            dest[given] = source[taken]

    def _move(self, move: CacheMove) -> None:
        assert len(move.source) == len(move.dest) == len(set(move.dest))
        if move.kind.endswith("_state"):
            self._move_state(move)
            return
        blocks, host, limits = self.blocks, self.host, (self.num_blocks, self.num_host_blocks)
        kind = move.kind
        if kind.endswith("_window"):
            kind = kind.removesuffix("_window")
            blocks, host = self.window_blocks, self.window_host
            limits = self.num_window_blocks, self.num_host_window_blocks
        source, dest = host if kind == "swap_in" else blocks, host if kind == "swap_out" else blocks
        limit = limits[kind == "swap_out"]
        assert all(0 <= block < limit for block in move.dest)
        taken = [dict(source[block]) for block in move.source]
        for block, cells in zip(move.dest, taken, strict=True):
            dest[block] = {offset: cell._replace(position=cell.position + move.shift) for offset, cell in cells.items()}

    def _write(self, entry: BatchEntry) -> None:
        known = self.sequences[entry.seq_id]
        if entry.new_tokens:
            first = entry.begin + entry.num_tokens - len(entry.new_tokens)
            assert 0 <= first <= len(known.token_ids), "there is a gap before the new tokens"
            known.token_ids[first:] = entry.new_tokens
        assert entry.first_block <= len(known.block_table)
        known.block_table[entry.first_block :] = entry.new_blocks
        assert entry.first_window_block <= len(known.window_table)
        known.window_table[entry.first_window_block :] = entry.new_window_blocks
        assert entry.num_tokens > 0
        end = entry.begin + entry.num_tokens
        assert end <= len(known.token_ids), "tokens are run that the worker does not know"
        num_dropped = entry.begin - entry.position
        assert entry.position + entry.num_tokens <= self.shift.context, "the context is full"
        assert all(0 <= block < self.num_blocks for block in known.block_table)
        for index in range(entry.begin, end):
            position = index - num_dropped
            cell = Cell(hash(tuple(known.token_ids[: index + 1])), num_dropped, position)
            self.blocks[known.block_table[position // self.block_size]][position % self.block_size] = cell
            if self.window:
                block = known.window_table[position // self.block_size]
                assert 0 <= block < self.num_window_blocks
                self.window_blocks[block][position % self.block_size] = cell

    def _read(self, entry: BatchEntry) -> EntryResult:
        known = self.sequences[entry.seq_id]
        end, num_dropped = entry.position + entry.num_tokens, entry.begin - entry.position
        for position in range(end):
            index = position + (num_dropped if position >= self.shift.kept else 0)
            expected = Cell(hash(tuple(known.token_ids[: index + 1])), self.shift.num_dropped(index), position)
            held = self.blocks[known.block_table[position // self.block_size]].get(position % self.block_size)
            assert held == expected, f"position {position} of sequence {entry.seq_id} holds other tokens"
            if self.window and position > entry.position - self.window:
                held = self.window_blocks[known.window_table[position // self.block_size]]
                assert held.get(position % self.block_size) == expected, f"a window lacks position {position}"
        at_end = entry.begin + entry.num_tokens == len(known.token_ids)
        pooling = known.sampling.pooling
        assert (entry.num_samples > 0) == (at_end and not pooling), "only a sequence's end samples, and it always does"
        assert entry.num_samples <= entry.num_tokens, "a prefix is sampled whose last token is not run"
        assert entry.is_decode == (
            entry.num_samples == entry.num_tokens and entry.begin >= known.sampling.num_prompt_tokens
        )
        if pooling:
            ran = known.token_ids[entry.begin : entry.begin + entry.num_tokens]
            known.pooled_ids = [*known.pooled_ids, *ran] if pooling == "mean" else ran[-1:]
            return EntryResult(vector=tuple(vector_of(known.pooled_ids)) if at_end else ())
        lengths = range(len(known.token_ids) + 1 - entry.num_samples, len(known.token_ids) + 1)
        tokens = tuple(self._sample(entry.seq_id, known, length) for length in lengths)
        if known.sampling.logprobs is None:
            return EntryResult(tokens)
        tops = [likely_tokens(known.token_ids[:length], known.sampling.logprobs) for length in lengths]
        return EntryResult(
            tokens, tuple(TokenLogprobs(token, 0.0, top) for token, top in zip(tokens, tops, strict=True))
        )

    @staticmethod
    def _sample(seq_id: int, known: KnownSequence, length: int) -> int:
        """The token behind the first ``length``; another one where a token of the answer before it is wrong."""
        answer = range(known.sampling.num_prompt_tokens, length)
        right = all(known.token_ids[index] == token_at(seq_id, index) for index in answer)
        return token_at(seq_id, length) if right else WRONG_TOKEN

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            del self.sequences[seq_id]  # KeyError: told twice, or never started
