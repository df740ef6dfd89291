"""``Bench``: a scheduler with a model of its workers, and the checks that hold after every event."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fake_clock import FakeClock
from worker_model import VECTOR_SIZE, WRONG_TOKEN, ContextShift, WorkerModel, likely_tokens, token_at, vector_of

from labinfer.base.config import CacheOptions, SchedulerOptions
from labinfer.base.plan import BatchPlan, BatchResult, EntryResult, TokenLogprobs, TokenSampling
from labinfer.base.rank_stats import StepTimes
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.assemble import make_scheduler
from labinfer.engine.beam_search import BeamGroup, BeamSearch
from labinfer.engine.block_table import SequenceCache
from labinfer.engine.cache_capacity import SlidingWindow
from labinfer.engine.guide import Guide, allows
from labinfer.engine.proposer import Proposer
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.engine.sequence import Sequence, token_sampling
from labinfer.engine.spec import EngineSpec

VOCAB_SIZE = WRONG_TOKEN + 1


@dataclass
class RandomProposer:
    """Drafts any number of tokens of which some are right, then a wrong one or none."""

    draw: random.Random
    share: float = 0.8
    """How many of the tokens are right."""
    full: bool = False
    """Whether drafts are always as long as can be."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return list(map(self._propose, sequences, limits))

    def _propose(self, sequence: Sequence, limit: int) -> list[int]:
        first = len(sequence.token_ids)
        count = limit if self.full else self.draw.randint(0, limit)
        right = [token_at(sequence.seq_id, first + index) for index in range(count)]
        return [token if self.draw.random() < self.share else WRONG_TOKEN for token in right]

    def forget(self, sequences: list[Sequence]) -> None:
        assert all(sequence.finish_reason is not None for sequence in sequences)


@dataclass
class FixedProposer:
    """Drafts as many tokens as there is room for, up to a number."""

    count: int
    is_right: Callable[[int], bool] = lambda index: True
    """Whether the token at this index of the sequence is guessed right."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return [
            [
                token_at(sequence.seq_id, index) if self.is_right(index) else WRONG_TOKEN
                for index in range(len(sequence.token_ids), len(sequence.token_ids) + min(self.count, limit))
            ]
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def forget(self, sequences: list[Sequence]) -> None:
        pass


@dataclass
class ListGuide:
    """Allows one token after the other, and then nothing."""

    form: list[int]
    tokens: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def mask(self) -> bytes:
        if len(self.tokens) == len(self.form):
            return b""
        bit = 1 << self.form[len(self.tokens)]
        return bit.to_bytes(bit.bit_length() // 8 + 1, "little")

    def accept(self, token: int) -> None:
        assert allows(self.mask, token)
        self.tokens.append(token)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


class Bench:
    """A scheduler and its workers, with the checks that hold after every event.

    Args:
        max_context: tokens of a sequence in the KV cache at once; by default as many as there is room for.
        snapshot_interval: tokens; by default those of three blocks.
        options: the scheduler's.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        num_stages: int = 1,
        eos: tuple = (),
        num_host_blocks: int = 0,
        max_context: int = 0,
        times: StepTimes | None = None,
        proposer: Proposer | None = None,
        num_states: int = 0,
        num_host_states: int = 0,
        snapshot_interval: int = 0,
        window: int = 0,
        num_window_blocks: int = 0,
        num_host_window_blocks: int = 0,
        enable_prefix_caching: bool = True,
        prefix_cache_eviction: str = "lru",
        is_one_cpu_host: bool = False,
        is_causal: bool = True,
        **options,
    ):
        self.options = SchedulerOptions(**options)
        self.max_chunk = self.options.chunked_prefill_size if is_causal else self.options.max_num_batched_tokens
        self.has_drafts, self.num_behind = proposer is not None, 0
        self.max_context = max_context or num_blocks * block_size
        self.clock = FakeClock(0.0)
        spec = EngineSpec(
            num_stages=num_stages,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            window=window,
            num_window_blocks=num_window_blocks,
            num_host_window_blocks=num_host_window_blocks,
            num_states=num_states,
            num_host_states=num_host_states,
            vocab_size=VOCAB_SIZE,
            hidden_size=VECTOR_SIZE,
            max_model_len=self.max_context,
            eos_token_ids=eos,
            is_one_cpu_host=is_one_cpu_host,
            is_causal=is_causal,
            step_times=times,
        )
        self.scheduler = make_scheduler(
            spec,
            cache=CacheOptions(
                block_size=block_size,
                snapshot_interval=snapshot_interval or 3 * block_size,
                enable_prefix_caching=enable_prefix_caching,
                prefix_cache_eviction=prefix_cache_eviction,
            ),
            scheduling=self.options,
            clock=self.clock,
            proposer=proposer,
        )
        self.searches = BeamSearch(self.scheduler, self.options, VOCAB_SIZE)
        self.tables = self.scheduler.tables
        self.blocks = self.tables.blocks
        kept = -(-self.options.keep // block_size) * block_size
        dropped = max(1, (self.max_context - kept) // 2 // block_size) * block_size
        shift = ContextShift(self.max_context, kept, dropped)
        self.worker = WorkerModel(
            num_blocks,
            block_size,
            num_host_blocks,
            shift,
            num_states,
            num_host_states,
            window,
            num_window_blocks,
            num_host_window_blocks,
        )
        self.results: deque[BatchResult] = deque()
        self.plans: list[BatchPlan] = []
        self.sequences: list[Sequence] = []
        self.updates: dict[int, list[AnswerUpdate]] = defaultdict(list)

    def add(
        self,
        prompt_tokens: int,
        max_tokens: int,
        shared: int = 0,
        ignore_eos: bool = False,
        num_beams: int = 1,
        guide: Guide | None = None,
        **fields,
    ) -> Sequence:
        """A request whose first ``shared`` tokens are those of every other one that shares."""
        seq_id = len(self.sequences)
        prompt = [1000 + position if position < shared else -1 - seq_id for position in range(prompt_tokens)]
        sampling = SamplingParams()
        if not fields.get("pooling"):
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, num_beams=num_beams)
        self.add_request(Request(key=seq_id, prompt_token_ids=prompt, sampling=sampling, **fields), guide)
        return self.sequences[seq_id]

    def add_request(self, request: Request, guide: Guide | None = None) -> None:
        ends, num_beams = sorted(request.ends(self.scheduler.eos_token_ids)), request.sampling.num_beams

        def make_sequence(choice: int, sampling: TokenSampling) -> Sequence:
            sequence = Sequence(
                seq_id=len(self.sequences),
                request=request,
                token_ids=[*request.prompt_token_ids, *request.output_token_ids],
                token_sampling=sampling,
                max_tokens=request.sampling.max_tokens,
                max_context=self.max_context,
                cache=SequenceCache(salt=request.cache_salt),
                vector_size=VECTOR_SIZE if request.pooling else 0,
                guide=guide,
            )
            self.sequences.append(sequence)
            return sequence

        if num_beams > 1:
            group = self.searches.make(request, ends, make_sequence)
            for member in group.members:
                member.group = group
            self.scheduler.add(group.members[0])
        else:
            self.scheduler.add(make_sequence(0, token_sampling(request, 0, ends)))

    def launch(self) -> BatchPlan | None:
        """One ``schedule``; its plan is run at once, its result waits."""
        before = {s.seq_id: (s.num_in_flight, s.num_preemptions) for s in self.scheduler.running}
        on_their_way = {s.seq_id for s in self.scheduler.running if s.num_in_flight > s.num_results_to_discard}
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_windows()
        for sequence in self.scheduler.running:
            found = sequence.cache.num_registered * self.blocks.block_size
            assert found <= len(sequence.token_ids), "a block with unverified tokens can be found"
        for seq_id, (num_in_flight, num_preemptions) in before.items():
            preempted = self.sequences[seq_id].num_preemptions > num_preemptions
            assert not (preempted and num_in_flight), "a sequence was preempted with a token on its way"
        if plan is not None:
            self.check_chunks(plan, on_their_way)
            assert plan.num_tokens <= self.options.max_num_batched_tokens
            assert all(entry.num_tokens <= self.max_chunk for entry in plan.entries)
            assert len(self.scheduler.running) <= self.options.max_num_seqs
            self.plans.append(plan)
            self.results.append(self.worker.run(plan))
        return plan

    def check_chunks(self, plan: BatchPlan, on_their_way: set[int]) -> None:
        """Drafted tokens go behind others only if all of a step's do, and nobody waits."""
        sequences = [self.sequences[entry.seq_id] for entry in plan.entries]
        behind = [
            entry.begin >= len(sequence.token_ids) for entry, sequence in zip(plan.entries, sequences, strict=True)
        ]
        if any(behind):
            assert all(behind) and not self.scheduler.waiting and self.has_drafts
            assert {sequence.seq_id for sequence in sequences} <= on_their_way and self.tables.states is None
            self.num_behind += 1
        for sequence in sequences:
            assert sequence.num_scheduled == len(sequence.token_ids) + len(sequence.draft) or not sequence.draft
            assert len(sequence.draft) < self.options.chunked_prefill_size

    def check_windows(self) -> None:
        """A sequence that runs holds the blocks of the windowed layers that its next token sees, and no more behind them than
        its first ones."""
        windows = self.tables.windows
        if windows is None:
            return
        for sequence in self.scheduler.running:
            cache, table = sequence.cache, sequence.cache.windowed
            assert len(table.blocks) >= self.blocks.blocks_for(cache.num_tokens)
            certain = min(cache.num_tokens, len(sequence.token_ids) - cache.num_dropped)  # others are drafted
            if cache.keeps_windows:
                assert table.num_freed == 0
                continue
            assert table.num_freed <= windows.first_seen(cache, certain)
            drafted = self.blocks.blocks_for(self.options.chunked_prefill_size) if self.has_drafts else 0
            window = SlidingWindow(self.worker.window, self.blocks.block_size)
            assert len(table.in_use) <= window.blocks_between_steps + drafted

    def launch_all(self) -> list[BatchPlan]:
        plans = []
        while (plan := self.launch()) is not None:
            plans.append(plan)
        return plans

    def update(self) -> list[Sequence]:
        """Hand the oldest result back."""
        advanced = self.scheduler.update(self.results.popleft())
        self.scheduler.check_integrity()
        for sequence in advanced:
            self.updates[sequence.seq_id].append(sequence.update())
        return advanced

    def step_at_random(self, draw: random.Random) -> None:
        """Now and then a request comes or ends too early; all that can be launched is, and one result comes back."""
        if draw.random() < 0.2 and len(self.scheduler.waiting) < 3:
            self.add(draw.randint(1, 30), draw.randint(1, 30), shared=draw.choice([0, 8]))
        elif draw.random() < 0.05 and self.scheduler.running:
            self.scheduler.finish(draw.choice(self.scheduler.running), FinishReason.ABORT)
        self.launch_all()
        if self.results:
            self.update()

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
        assert self.tables.host.num_free == self.tables.host.num_blocks
        assert self.tables.is_idle
        for sequence in self.sequences:
            self.check_tokens(sequence)

    def check_tokens(self, sequence: Sequence) -> None:
        """Each output token is the one sampled at its own position, whatever happened on the way."""
        begin, pooling = sequence.num_prompt_tokens, sequence.request.pooling
        if pooling and sequence.finish_reason is not FinishReason.ABORT:
            prompt = sequence.request.prompt_token_ids
            assert sequence.embedding == vector_of(prompt if pooling == "mean" else prompt[-1:])
            assert (sequence.token_ids, sequence.finish_reason) == (prompt, FinishReason.STOP)
            return
        if sequence.group is not None:
            if sequence.finish_reason is not FinishReason.ABORT:
                self.check_beams(sequence.group)
            return
        expected = [token_at(sequence.seq_id, begin + index) for index in range(sequence.num_output_tokens)]
        assert sequence.output_ids == expected
        updates = self.updates[sequence.seq_id]
        told = [token for update in updates for token in update.token_ids]
        assert told == expected[len(sequence.request.output_token_ids) :]
        if sequence.token_sampling.logprobs is not None:
            assert [measured.token_id for update in updates for measured in update.logprobs] == told
        if sequence.finish_reason is FinishReason.LENGTH:
            assert sequence.num_output_tokens == sequence.max_tokens

    @staticmethod
    def check_beams(group: BeamGroup) -> None:
        """The answers are those of a search without any cache."""
        plain = [([], 0.0)]
        alone = BeamGroup(members=[], sampling=group.sampling, ends=group.ends, max_tokens=group.max_tokens)
        prompt = group.members[0].request.prompt_token_ids
        while plain:
            alone.members = [PlainBeam(output_ids) for output_ids, _ in plain]
            alone.scores = {index: score for index, (_, score) in enumerate(plain)}
            for member in alone.members:
                count = BeamGroup.num_candidates(group.sampling, group.ends)
                top = likely_tokens([*prompt, *member.output_ids], count)
                alone.take(member, EntryResult(logprobs=(TokenLogprobs(0, 0.0, top),)))
            children = alone.next_beams()
            plain = [([*alone.members[child.parent].output_ids, child.token], child.score) for child in children]
        assert group.finished == alone.finished


@dataclass(eq=False)
class PlainBeam:
    output_ids: list[int]

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)
