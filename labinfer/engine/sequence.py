"""Sequence: one answer of a request, with its token ids and how many of them are scheduled."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from labinfer.base.plan import (
    NO_TOKEN,
    WHOLE_PROMPT_POOLINGS,
    EntryResult,
    TokenLogprobs,
    TokenSampling,
    count_accepted,
)
from labinfer.base.sampling_params import MAX_SEED, SamplingParams
from labinfer.engine.block_table import SequenceCache
from labinfer.engine.constraints import no_token_left
from labinfer.engine.guide import Guide, allows
from labinfer.engine.request import AnswerUpdate, FinishedBeam, FinishReason, Request

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One answer of a request. Token ids and positions are its whole state; everything else can be recomputed."""

    seq_id: int
    request: Request
    token_ids: list[int]
    """Prompt and answer so far."""
    token_sampling: TokenSampling
    max_tokens: int
    """Maximum number of output tokens: the request's limit, cut to the context."""
    max_context: int
    """Maximum number of the sequence's tokens in the KV cache at once."""
    choice: int = 0
    """Index of the answer within the request."""
    cache: SequenceCache = field(default_factory=SequenceCache)
    group: SequenceGroup | None = None
    """Sequences of the request that advance together with this one, such as beams."""
    guide: Guide | None = None
    """Grammar matcher of a structured output."""
    num_in_flight: int = 0
    """Micro-batches in flight that contain this sequence."""
    started: bool = False
    """Whether the workers know this sequence."""
    num_tokens_sent: int = 0
    """Tokens that plans have sent to the workers, without drafted ones."""
    draft: tuple[int, ...] = ()
    """Drafted tokens in flight, in one chunk or several."""
    draft_positions: tuple[int, ...] = ()
    """Position of each drafted token in the draft of its chunk."""
    num_unverified: int = 0
    """Number of drafted tokens at the end of ``token_ids``. Only within ``with_draft_applied`` are there any; elsewhere it is 0."""
    num_results_to_discard: int = 0
    """Number of micro-batches in flight, the oldest ones, whose results are discarded: they run a rejected token."""
    num_mtp_drafts: int = 0
    """Number of tokens that the MTP layer drafts in the step that is being composed."""
    mtp_draft: tuple[int, ...] = ()
    """Tokens that the MTP layer drafted to follow ``token_ids``."""
    num_drafted: int = 0
    """Drafted tokens verified since the last update."""
    num_accepted: int = 0
    """Drafted tokens accepted since the last update."""
    finish_reason: FinishReason | None = None
    error: str = ""
    """Reason why the engine aborted the answer; empty if it did not."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, hits after a preemption not counted."""
    num_preemptions: int = 0
    sort_key: tuple[int, ...] | None = None
    """Sort key of the scheduling policy, set on arrival; constant."""
    arrival: float | None = None
    """Arrival time: when the sequence was first enqueued."""
    queue_seconds: float | None = None
    """Seconds from the sequence's arrival until it was first admitted."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the output tokens since the last update, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens except the first, if requested."""
    vector_size: int = 0
    """Length of the vector of a pooled prompt; 0 for generation."""
    embedding: list[float] | None = None
    """Vector of a pooled prompt, once it is computed."""
    _draft_masks: tuple[bytes, ...] = ()  # mask of the next token, then of those after each drafted token
    _num_reported: int = field(init=False)  # output tokens that ``update`` has returned
    decode_bytes: int = field(init=False)
    """Maximum bytes of an ``EntryResult`` for a decode without draft."""

    def __post_init__(self) -> None:
        self._num_reported = len(self.request.output_token_ids)
        self.decode_bytes = EntryResult.max_bytes(num_samples=1, top=self.token_sampling.logprobs)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_scheduled(self) -> int:
        """Tokens scheduled so far, including those in flight."""
        return self.cache.num_tokens + self.cache.num_dropped

    @property
    def num_unscheduled(self) -> int:
        """Known or drafted tokens that are not scheduled yet."""
        return len(self.token_ids) + len(self.draft) - self.num_scheduled

    @property
    def num_positions(self) -> int:
        """Number of tokens in the KV cache once all of ``token_ids`` have run: at most ``max_context``."""
        return min(len(self.token_ids), self.max_context)

    @property
    def order(self) -> int:
        """Order of arrival; equal for all beams of a request."""
        return self.group.members[0].seq_id if self.group else self.seq_id

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the next step is a decode: only the last token is unscheduled, apart from tokens to run again after a state rollback."""
        num_again = len(self.token_ids) - 1 - self.num_scheduled
        return 0 <= num_again <= self.cache.num_again and self.num_scheduled >= len(self.request.prompt_token_ids)

    @property
    def needs_all_prompt_outputs(self) -> bool:
        """Whether every prompt token must be run, cached or not: for prompt log-probabilities that are missing, or for
        pooling over tokens before the last."""
        if self.request.pooling in WHOLE_PROMPT_POOLINGS:
            return True
        asks = self.token_sampling.prompt_logprobs is not None
        return asks and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def masks(self) -> tuple[bytes, ...]:
        """Token masks of the next token and of those after each drafted token, as in ``BatchEntry``."""
        if self.guide is None:
            return ()
        return self._draft_masks or (self.guide.mask,)

    @property
    def may_draft(self) -> bool:
        """Whether tokens may be drafted for the sequence: not for beams, pooling or missing prompt log-probabilities, or if
        the request forbids drafts."""
        return (
            self.sampling.speculate
            and self.group is None
            and not self.request.pooling
            and not self.needs_all_prompt_outputs
        )

    @contextmanager
    def with_draft_applied(self) -> Iterator[None]:
        """Append the drafted tokens to ``token_ids`` and to the guide, as if all were accepted; remove them at the end."""
        draft, guide = self.draft, self.guide
        for token in draft if guide is not None else ():
            guide.accept(token)
        self.token_ids += draft
        self.num_unverified = len(draft)
        try:
            yield
        finally:
            self.num_unverified = 0
            del self.token_ids[len(self.token_ids) - len(draft) :]
            if draft and guide is not None:
                guide.rollback(len(draft))

    def add_draft(self, token_ids: Iterable[int], eos_token_ids: frozenset[int]) -> int:
        """Add tokens to the draft, up to the first that ends the answer or that the guide forbids. Called within
        ``with_draft_applied``. Returns the number of tokens added."""
        ends, guide, draft, num_accepted = self.request.ends(eos_token_ids), self.guide, [], 0
        masks = [guide.mask] if guide is not None else []
        for token in token_ids:
            if token in ends or (guide is not None and not allows(masks[-1], token)):
                break
            if guide is not None:
                guide.accept(token)
                num_accepted += 1
                if not guide.mask:
                    break
                masks.append(guide.mask)
            draft.append(token)
        if num_accepted:
            guide.rollback(num_accepted)
        self.draft += tuple(draft)
        self.draft_positions += tuple(range(len(draft)))
        self._draft_masks = tuple(masks) if draft else ()
        return len(draft)

    def drop_draft(self, count: int) -> None:
        """Drop the last ``count`` drafted tokens, which will not be run."""
        num_kept = len(self.draft) - count
        self.draft, self.draft_positions, self._draft_masks = self.draft[:num_kept], self.draft_positions[:num_kept], ()

    def extend(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], eos_token_ids: frozenset[int]
    ) -> tuple[FinishReason | None, int]:
        """Append the tokens that a chunk sampled: the next token, then one after each drafted token.

        Drafted tokens are accepted while they equal the sampled ones (``count_accepted``). The first sampled token that differs is the
        last to be appended, as is one that ends the answer. Later chunks in flight begin with a draft of this chunk's last token; they
        are discarded once a token differs. Returns why the answer ends, if it does, and the number of accepted tokens.
        """
        if not self.draft:
            self.logprobs += logprobs
            return self._append(token_ids[0], eos_token_ids), 0
        draft, num_right, reason = self.draft, count_accepted(self.draft, token_ids), None
        for index, token in enumerate(token_ids[: num_right + 1]):
            reason = self._append(token, eos_token_ids)
            if reason is not None:
                num_right = index
                break
        self.num_tokens_sent += num_right
        self.logprobs += logprobs[: num_right + 1]
        self._draft_masks = ()
        if num_right == len(token_ids):
            self.draft, self.draft_positions = draft[num_right:], self.draft_positions[num_right:]
        else:
            self.draft = self.draft_positions = ()
            self.num_results_to_discard = self.num_in_flight if num_right < len(draft) else 0
        return reason, num_right

    def _append(self, token: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        if token == NO_TOKEN:
            return self.break_off(no_token_left(self.request, self.num_output_tokens))
        self.token_ids.append(token)
        if token in self.request.ends(eos_token_ids):
            return FinishReason.STOP
        if self.guide is not None:
            self.guide.accept(token)
            if self.guide.error:
                return self.break_off(f"{self.request.form_field} became too complex: {self.guide.error}")
            if not self.guide.mask:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output_tokens >= self.max_tokens else None

    def break_off(self, error: str) -> FinishReason:
        """Record why the answer cannot continue. Returns ``FinishReason.ABORT``."""
        logger.warning("sequence %d is aborted: %s", self.seq_id, error)
        self.error = error
        return FinishReason.ABORT

    def update(self) -> AnswerUpdate:
        """Return the tokens and events since the last call."""
        if self.request.pooling:
            return AnswerUpdate(
                index=0,
                finish_reason=self.finish_reason,
                num_cached_tokens=self.num_cached_tokens,
                embedding=self.embedding,
                queue_seconds=self.queue_seconds,
            )
        wants_prompt = self.sampling.prompt_logprobs is not None and self.choice == 0
        prompt_logprobs = self.prompt_logprobs if wants_prompt else None
        if self.group is None:
            num_resumed = len(self.request.output_token_ids)
            begin, self._num_reported = self._num_reported, self.num_output_tokens
            num_drafted, num_accepted = self.num_drafted, self.num_accepted
            self.num_drafted = self.num_accepted = 0
            is_first = begin == num_resumed
            logprobs, self.logprobs = self.logprobs[: self.num_output_tokens - begin], []
            return AnswerUpdate(
                index=self.choice,
                token_ids=self.token_ids[self.num_prompt_tokens + begin :],
                logprobs=logprobs,
                finish_reason=self.finish_reason,
                num_cached_tokens=self.num_cached_tokens,
                num_drafted=num_drafted,
                num_accepted=num_accepted,
                prompt_logprobs=prompt_logprobs if is_first else None,
                queue_seconds=self.queue_seconds if is_first else None,
                error=self.error,
            )
        if self.finish_reason is None:
            return AnswerUpdate(index=0)
        return AnswerUpdate(
            index=0,
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            beams=self.group.finished[: self.sampling.n],
            queue_seconds=self.queue_seconds,
            error=self.error,
        )

    def result_bytes(self, begin: int, num_samples: int, num_drafts: int = 0) -> int:
        """Maximum bytes of the ``EntryResult`` of a chunk: the sequence's scheduled tokens from index ``begin`` on."""
        num_numbers = self.vector_size if self.num_unscheduled == 0 else 0
        num_prompt = (
            max(0, min(self.num_scheduled, self.num_prompt_tokens - 1) - begin) if self.needs_all_prompt_outputs else 0
        )
        sampling = self.token_sampling
        return EntryResult.max_bytes(
            num_samples=num_samples,
            top=sampling.logprobs,
            num_prompt=num_prompt,
            prompt_top=sampling.prompt_logprobs,
            num_numbers=num_numbers,
            num_drafts=num_drafts,
        )


class SequenceGroup(Protocol):
    """Sequences of one request that advance together, once each has its next token; see ``beam_search.BeamGroup``."""

    members: list[Sequence]
    """Sequences of the group; the first one runs the prompt."""
    finished: list[FinishedBeam]
    """Finished answers, best first."""

    def has_token(self, member: Sequence) -> bool:
        """Whether ``member`` has its next token and waits for the other members."""

    def take(self, member: Sequence, result: EntryResult) -> bool:
        """Store a member's result. Returns whether all members have one."""

    def advance(self) -> FinishReason | None:
        """Append a token to each member; a member may first become a copy of another member. Returns the finish reason once the group ends."""


def token_sampling(request: Request, choice: int, ends: list[int]) -> TokenSampling:
    """Sampling parameters of a request's answer for the last stage.

    Args:
        choice: index of the answer within the request.
        ends: stop token ids.
    """
    sampling = request.sampling
    processors = [
        ("logit_bias", sampling.logit_bias, {}),
        ("allowed_token_ids", list(sampling.allowed_token_ids), []),
        ("repetition_penalty", sampling.repetition_penalty, 1.0),
        ("presence_penalty", sampling.presence_penalty, 0.0),
        ("frequency_penalty", sampling.frequency_penalty, 0.0),
        ("bad_words", [list(word) for word in request.bad_token_ids], []),
        ("min_tokens", [sampling.min_tokens if ends else 0, ends], [0, ends]),
    ]
    logprobs = sampling.logprobs
    if sampling.num_choices > sampling.n and logprobs is None:
        logprobs = 0  # ``best_of`` chooses by log-probabilities
    return TokenSampling(
        num_prompt_tokens=len(request.prompt_token_ids),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        seed=(sampling.seed + choice) % (MAX_SEED + 1),
        logprobs=logprobs,
        prompt_logprobs=sampling.prompt_logprobs if choice == 0 else None,
        processors=[
            *((name, value) for name, value, neutral in processors if value != neutral),
            *sampling.logits_processors.items(),
        ],
        pooling=request.pooling,
    )
