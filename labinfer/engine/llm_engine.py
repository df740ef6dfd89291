"""LLMEngine: requests in, tokens out. Runs on rank 0 and handles token ids only."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from labinfer.base.config import SchedulerOptions
from labinfer.base.errors import PromptTooLong, UserError
from labinfer.base.plan import BatchPlan, TokenSampling
from labinfer.base.rank_stats import WorkerStats
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.tracer import Tracer
from labinfer.engine.block_table import SequenceCache
from labinfer.engine.constraints import check_constraints
from labinfer.engine.executor import Executor
from labinfer.engine.guide import Guide, GuideMaker, allows
from labinfer.engine.request import FinishReason, Request
from labinfer.engine.scheduler import InFlight, Scheduler
from labinfer.engine.sequence import Sequence, SequenceGroup, token_sampling
from labinfer.engine.spec import EngineSpec

logger = logging.getLogger(__name__)


class EngineState(Enum):
    IDLE = "idle"
    SCHEDULING = "scheduling"
    WAITING_WORKER = "waiting for a worker"
    ERROR = "error"


class RunningAnswer(NamedTuple):
    """Progress of a running sequence."""

    seq_id: int
    num_tokens: int
    """Output tokens so far."""
    max_tokens: int
    """Maximum number of output tokens."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """Current load of an engine."""

    num_running: int
    """Number of running sequences."""
    num_waiting: int
    kv_usage: float
    """Fraction of the KV blocks that are in use."""
    num_running_requests: int
    """Number of requests with running sequences."""
    running_answers: tuple[RunningAnswer, ...]


class QueueFull(UserError):
    """The waiting queue is full; retry later."""


class GroupMaker(Protocol):
    """Makes the sequence groups of requests, such as beams."""

    def check(self, request: Request, max_context: int) -> None:
        """Check a request that needs a group.

        Raises:
            UserError: the group can never run.
        """

    def make(
        self, request: Request, ends: list[int], make_sequence: Callable[[int, TokenSampling], Sequence]
    ) -> SequenceGroup:
        """Make the group of a request.

        Args:
            ends: stop token ids.
            make_sequence: makes the member of a given index.
        """


class LLMEngine:
    """Schedules requests over an executor.

    ``engine/assemble.py`` makes one.

    Args:
        scheduler: composes micro-batches.
        executor: runs the plans.
        options: scheduler options.
        recorder: traces the engine's time.
        groups: makes the groups of beam searches.
        guides: makes guides for structured outputs; None if no request has any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        spec: EngineSpec,
        *,
        options: SchedulerOptions,
        recorder: Tracer,
        groups: GroupMaker,
        guides: GuideMaker | None = None,
    ):
        self.scheduler = scheduler
        self.blocks, self._tables = scheduler.tables.blocks, scheduler.tables
        self._options = options
        self.max_model_len = spec.max_model_len
        self.state = EngineState.IDLE
        self._executor, self._recorder, self._groups, self._guides = executor, recorder, groups, guides
        self._vocab_size, self._head = spec.vocab_size, spec.score_head
        self._vector_size = spec.hidden_size if self._head is None else self._head.num_logits
        self._no_generation, self._dynamic_rope_from = spec.no_generation, spec.dynamic_rope_from
        self._next_seq_id = 0
        self.last_batch: InFlight | None = None
        """Micro-batch of the last ``poll_result``; None if none was in flight."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def wants_requests(self) -> bool:
        """Whether the waiting queue has fewer than ``max_num_seqs`` sequences."""
        return len(self.scheduler.waiting) < self._options.max_num_seqs

    def add_request(self, request: Request, admitted: bool = False) -> list[Sequence]:
        """Queue a request; never blocks. Returns its sequences, to which ``step`` appends tokens.

        Args:
            admitted: see ``EngineDriver.add``.

        Raises:
            QueueFull: the waiting queue is full; try again when requests have been admitted.
            UserError: the request can never run, such as with an empty or too long prompt.
        """
        sampling = request.sampling
        self._check_choices(sampling)
        if not admitted and not self.scheduler.has_room(sampling.num_choices):
            raise QueueFull(f"the queue is full: {len(self.scheduler.waiting)} sequences are waiting; try again later")
        self.check_request(request)
        if request.pooling and self._head is not None:
            request = replace(request, prompt_token_ids=self._head.trim(request.prompt_token_ids))
        ends = sorted(token for token in request.ends(self.scheduler.eos_token_ids) if token < self._vocab_size)
        if sampling.num_beams > 1:
            group = self._groups.make(request, ends, partial(self._make_sequence, request))
            for member in group.members:
                member.group = group
            sequences = group.members[:1]
        else:
            sequences = [
                self._make_sequence(request, choice, token_sampling(request, choice, ends))
                for choice in range(sampling.num_choices)
            ]
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    def _make_sequence(self, request: Request, choice: int, sampling: TokenSampling) -> Sequence:
        self._next_seq_id += 1
        return Sequence(
            seq_id=self._next_seq_id - 1,
            request=request,
            token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            token_sampling=sampling,
            max_tokens=self._max_tokens(request),
            max_context=self._context_size(request),
            choice=choice,
            cache=SequenceCache(salt=self._cache_salt(request)),
            vector_size=self._vector_size if request.pooling else 0,
            guide=self._make_guide(request),
        )

    def _cache_salt(self, request: Request) -> str:
        """Salt of a request's KV blocks, with the prompt length if keys depend on it (dynamic RoPE)."""
        if not self._dynamic_rope_from:
            return request.cache_salt
        length = len(request.prompt_token_ids)
        return f"{length if length > self._dynamic_rope_from else 0}:{request.cache_salt}"

    def _make_guide(self, request: Request) -> Guide | None:
        form = request.sampling.structured_outputs
        if form is None:
            return None
        assert self._guides is not None, "no guide factory for structured outputs was given to the engine"
        guide = self._guides.make(form, request.before_form)
        for number, token in enumerate(request.output_token_ids):
            if not allows(guide.mask, token):
                raise UserError(
                    f"output_token_ids violate structured_outputs: token {token} at position {number} is not allowed"
                )
            guide.accept(token)
            if guide.error:
                raise UserError(f"output_token_ids cannot be matched against structured_outputs: {guide.error}")
        if not guide.mask:
            raise UserError("output_token_ids already complete the structured output; nothing is left to generate")
        return guide

    def _context_size(self, request: Request) -> int:
        """Maximum number of tokens of a request's sequences in the context at once."""
        return min(self.max_model_len, request.sampling.max_context_len or self.max_model_len)

    def _max_tokens(self, request: Request) -> int:
        """Maximum number of output tokens: the request's limit, cut to the context unless contexts are shifted."""
        if self._options.context_shift:
            return request.sampling.max_tokens
        return min(request.sampling.max_tokens, self._context_size(request) - len(request.prompt_token_ids))

    def check_request(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            UserError: the text says which limit or option the request conflicts with.
        """
        prompt_ids, sampling = request.prompt_token_ids, request.sampling
        if not prompt_ids:
            raise UserError("the prompt is empty; give at least one token")
        context = self._context_size(request)
        if request.pooling:
            assert sampling == SamplingParams(), "a pooled request samples nothing"
            if len(prompt_ids) > context:
                raise PromptTooLong.for_context(context, f"your prompt has {len(prompt_ids)} tokens")
        elif self._no_generation:
            raise UserError(
                f"this model {self._no_generation} and cannot generate text; request {'scores' if self._head else 'embeddings'} instead"
            )
        elif len(prompt_ids) >= context:
            raise PromptTooLong.for_context(
                context,
                f"your prompt has {len(prompt_ids)} tokens, and at most {context - 1} leave space for one output token",
            )
        elif len(prompt_ids) + sampling.max_tokens > context:
            if self._options.context_shift:
                self._check_shift(context)
            elif request.max_tokens_field and not request.output_token_ids:
                raise UserError(
                    f"{request.max_tokens_field} {sampling.max_tokens} is too large. This model's maximum context length is "
                    f"{context} tokens and your prompt has {len(prompt_ids)}, so that {context - len(prompt_ids)} fit: lower "
                    f"{request.max_tokens_field}, or leave it out"
                )
        if sampling.num_beams > 1:
            self._groups.check(request, context)
        self._check_ids("token id", prompt_ids)
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self._check_ids(f"{name}: token id", getattr(sampling, name))
        self._check_ids("bad_words: token id", itertools.chain(*request.bad_token_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(sampling, name) or 0) > self._vocab_size:
                raise UserError(
                    f"{name} {getattr(sampling, name)} is more than the vocabulary size, {self._vocab_size}"
                )
        self._check_resumed(request)
        guide = self._make_guide(request)
        check_constraints(
            request, request.ends(self.scheduler.eos_token_ids), self._vocab_size, guide.mask if guide else b""
        )
        self._check_choices(sampling)

    def _check_choices(self, sampling: SamplingParams) -> None:
        limit = self.scheduler.max_queued
        if limit and sampling.num_choices > limit:
            raise UserError(
                f"{sampling.num_choices} outputs are requested, but the queue holds at most {limit} sequences"
            )

    def _check_resumed(self, request: Request) -> None:
        tokens, sampling = request.output_token_ids, request.sampling
        if not tokens:
            return
        if request.pooling or sampling.num_beams > 1 or sampling.num_choices > 1:
            raise UserError(
                "output_token_ids need a single output, without beam search or pooling; send separate requests"
            )
        self._check_ids("output_token_ids: token id", tokens)
        if len(tokens) >= (most := self._max_tokens(request)):
            raise UserError(f"output_token_ids has {len(tokens)} tokens, but at most {most} may be generated")
        if ends := request.ends(self.scheduler.eos_token_ids).intersection(tokens):
            raise UserError(
                f"output_token_ids has token {min(ends)}, which ends the output; nothing is left to generate"
            )

    def _check_shift(self, context: int) -> None:
        least = self.blocks.tokens_in(self.blocks.blocks_for(self._options.keep) + 2)
        if context < least:
            raise UserError(
                f"the context length of {context} tokens is too short for --context-shift: --keep "
                f"{self._options.keep} and two blocks of {self.blocks.block_size} need {least}; lower --keep or "
                "--block-size"
            )

    def _check_ids(self, what: str, token_ids: Iterable[int]) -> None:
        token_ids = list(token_ids)
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self._vocab_size:
            raise UserError(f"{what} {low if low < 0 else high} is outside the vocabulary of {self._vocab_size} tokens")

    def abort(self, sequence: Sequence, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a sequence (with all beams of its request) at once, and free its blocks."""
        self.scheduler.finish(sequence, reason)

    def step(self) -> list[Sequence]:
        """Launch all micro-batches that may start, and wait for the oldest one. Returns the sequences that got a token or vector."""
        self.state = EngineState.SCHEDULING
        try:
            while (plan := self._schedule()) is not None:
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("%s", self.scheduler.describe(plan))
                self._executor.launch(plan)
            return self.poll_result()
        except BaseException:
            self.state = EngineState.ERROR
            raise

    def _schedule(self) -> BatchPlan | None:
        with self._recorder.slice("schedule"):
            return self.scheduler.schedule()

    def poll_result(self) -> list[Sequence]:
        """Wait for the oldest micro-batch in flight and process its result. Returns the sequences that got a token or vector."""
        advanced, self.last_batch = [], None
        if self.scheduler.in_flight:
            self.state = EngineState.WAITING_WORKER
            batch = self.last_batch = self.scheduler.in_flight[0]
            with self._recorder.slice("wait for tokens", batch.plan):
                result = self._executor.wait_result()
            with self._recorder.slice("update", batch.plan):
                advanced = self.scheduler.update(result)
        self.state = EngineState.SCHEDULING if self.has_work else EngineState.IDLE
        return advanced

    def load(self) -> EngineLoad:
        """Number of running and waiting sequences, and usage of the KV cache, now."""
        running = self.scheduler.running
        return EngineLoad(
            num_running=len(running),
            num_waiting=len(self.scheduler.waiting),
            kv_usage=self.blocks.usage,
            num_running_requests=len({id(sequence.request) for sequence in running}),
            running_answers=tuple(
                RunningAnswer(sequence.seq_id, sequence.num_output_tokens, sequence.max_tokens) for sequence in running
            ),
        )

    def drain(self) -> None:
        """Abort every request, and wait for all micro-batches in flight."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(sequence)
        while self.scheduler.in_flight:
            self.poll_result()

    def end_run(self) -> list[WorkerStats]:
        """End a run whose requests are all done. Returns the workers' statistics."""
        assert not self.has_work, "a run is ended with requests running"
        assert self._tables.is_idle, "a finished run left blocks behind"
        return self._executor.end_run(self.scheduler.take_finished_ids())
