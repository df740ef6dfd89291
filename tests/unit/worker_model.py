"""A pure-Python model of what every worker does with plans: it keeps the picture and checks that it makes sense."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from labinfer.config import SchedulerOptions
from labinfer.engine.block_manager import BlockManager
from labinfer.engine.request import Request
from labinfer.engine.scheduler import Scheduler
from labinfer.engine.sequence import FinishReason, Sequence, token_sampling
from labinfer.plan import NO_TOKEN, BatchPlan, BatchResult, SamplingParams


def token_at(seq_id: int, position: int) -> int:
    """The token that the pretended model samples there: a pure function, as the real one's."""
    return (seq_id * 7919 + position * 104729) % 1000


@dataclass
class KnownSequence:
    token_ids: list[int]
    num_computed: int
    block_table: list[int] = field(default_factory=list)


class WorkerModel:
    """Applies plans as deltas, in order, and asserts that each can be carried out."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.sequences: dict[int, KnownSequence] = {}
        self.slots: dict[int, int] = {}  # slot → hash of the tokens up to the one whose keys and values it holds
        self.next_step_id = 0

    def run(self, plan: BatchPlan) -> BatchResult:
        assert plan.step_id == self.next_step_id, "steps are numbered without gaps"
        self.next_step_id += 1
        self.forget(plan.finished)
        for start in plan.starts:
            assert start.seq_id not in self.sequences, "a sequence is started twice"
            self.sequences[start.seq_id] = KnownSequence(list(start.token_ids), start.num_cached)
        assert plan.entries, "an empty plan was launched"
        names = [entry.seq_id for entry in plan.entries]
        assert len(names) == len(set(names)), "a sequence is twice in one micro-batch"
        for entry in plan.entries:  # in every layer, all keys and values are written before any are read
            self._write(entry)
        sampled = [token for entry in plan.entries if (token := self._read(entry)) is not None]
        return BatchResult(plan.step_id, sampled)

    def _write(self, entry) -> None:
        known = self.sequences[entry.seq_id]
        if entry.new_token != NO_TOKEN:
            known.token_ids.append(entry.new_token)
        known.block_table += entry.new_blocks
        assert entry.num_tokens > 0
        end = known.num_computed + entry.num_tokens
        assert end <= len(known.token_ids), "tokens are run that the worker does not know"
        assert end <= len(known.block_table) * self.block_size, "a slot is out of the block table"
        assert all(0 <= block < self.num_blocks for block in known.block_table)
        for position in range(known.num_computed, end):
            self.slots[self._slot(known, position)] = hash(tuple(known.token_ids[: position + 1]))
        known.num_computed = end

    def _read(self, entry) -> int | None:
        known = self.sequences[entry.seq_id]
        for position in range(known.num_computed):
            held = self.slots.get(self._slot(known, position))
            assert held == hash(tuple(known.token_ids[: position + 1])), f"position {position} holds other tokens"
        at_end = known.num_computed == len(known.token_ids)
        assert entry.sample == at_end, "only a sequence's last token samples, and it always does"
        return token_at(entry.seq_id, known.num_computed) if entry.sample else None

    def _slot(self, known: KnownSequence, position: int) -> int:
        return known.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            del self.sequences[seq_id]  # KeyError: told twice, or never started


class Bench:
    """A scheduler, its blocks and the worker model, with results kept until they are asked for."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, num_stages: int = 1, eos: tuple = (), **options):
        self.blocks = BlockManager(num_blocks, block_size)
        self.options = SchedulerOptions(**options)
        self.scheduler = Scheduler(self.options, self.blocks, num_stages, eos)
        self.worker = WorkerModel(num_blocks, block_size)
        self.results: deque[BatchResult] = deque()
        self.plans: list[BatchPlan] = []
        self.sequences: list[Sequence] = []

    def add(self, prompt_tokens: int, max_tokens: int, shared: int = 0, ignore_eos: bool = False, **fields) -> Sequence:
        """A request whose first ``shared`` tokens are those of every other one that shares."""
        seq_id = len(self.sequences)
        prompt = [1000 + position if position < shared else -1 - seq_id for position in range(prompt_tokens)]
        self.add_request(
            Request(seq_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos), **fields)
        )
        return self.sequences[-1]

    def add_request(self, request: Request) -> None:
        seq_id, wanted = len(self.sequences), token_sampling(request, 0, [])
        prompt = list(request.prompt_token_ids)
        self.sequences.append(Sequence(seq_id, request, prompt, wanted, request.sampling.max_tokens))
        self.scheduler.add(self.sequences[-1])

    def launch(self) -> BatchPlan | None:
        """One ``schedule``; its plan is run at once, its result waits."""
        before = {s.seq_id: (s.num_in_flight, s.num_preemptions) for s in self.scheduler.running}
        plan = self.scheduler.schedule()
        self.blocks.check_integrity()
        for seq_id, (num_in_flight, num_preemptions) in before.items():
            preempted = self.sequences[seq_id].num_preemptions > num_preemptions
            assert not (preempted and num_in_flight), "a sequence was preempted with a token on its way"
        if plan is not None:
            assert plan.num_tokens <= self.options.max_num_batched_tokens
            assert all(entry.num_tokens <= self.options.chunked_prefill_size for entry in plan.entries)
            assert len(self.scheduler.running) <= self.options.max_num_seqs
            self.plans.append(plan)
            self.results.append(self.worker.run(plan))
        return plan

    def launch_all(self) -> list[BatchPlan]:
        plans = []
        while (plan := self.launch()) is not None:
            plans.append(plan)
        return plans

    def update(self) -> list[Sequence]:
        """Hand the oldest result back."""
        advanced = self.scheduler.update(self.results.popleft())
        self.blocks.check_integrity()
        return advanced

    def finish_all(self, limit: int = 10_000) -> None:
        """Run on as the engine does, to the end, and check that nothing is left behind."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.launch_all()
            assert self.results, "work is left, but nothing can start and nothing is on its way"
            self.update()
        assert not self.scheduler.has_work
        self.check_end()

    def check_end(self) -> None:
        self.worker.forget(self.scheduler.take_finished_ids())
        assert self.worker.sequences == {}, "the workers were not told to forget"
        assert self.blocks.num_free == self.blocks.num_blocks
        for sequence in self.sequences:
            self.check_tokens(sequence)

    def check_tokens(self, sequence: Sequence) -> None:
        """Each output token is the one sampled at its own position, whatever happened on the way."""
        begin = sequence.num_prompt_tokens
        expected = [token_at(sequence.seq_id, begin + index) for index in range(sequence.num_output_tokens)]
        assert sequence.output_ids == expected
        if sequence.finish_reason is FinishReason.LENGTH:
            assert sequence.num_output_tokens == sequence.max_tokens
