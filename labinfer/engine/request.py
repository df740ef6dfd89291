"""Request, and the engine's news of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from labinfer.base.plan import TokenLogprobs
from labinfer.base.sampling_params import SamplingParams


class FinishReason(str, Enum):
    """Why a request ended; ``stop`` and ``length`` as in OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to answer it."""

    key: Any
    """The caller's own name for it."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens of the answer that were generated before: it goes on behind them as if it had never stopped."""
    cache_salt: str = ""
    """Only requests with the same salt share KV blocks."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """The sampling's bad words as token ids."""
    priority: int = 0
    """With ``--scheduling-policy priority`` the lowest goes first."""
    user: str = ""
    """With ``--scheduling-policy fair`` users take turns."""
    is_chat: bool = False
    """Whether its answers are replies in a conversation, whose parts are told apart by marks in their text."""
    goes_on: bool = False
    """Whether these replies go on in a message that has begun, so that a space at their beginning is theirs."""
    before_form: str = ""
    """With structured outputs: rules of what stands before the form, such as a thought; see ``text/reply_grammar.py``."""
    pooling: str = ""
    """Pooling, of ``plan.POOLINGS``: the prompt is run and comes to one vector. Nothing is sampled, and ``sampling`` is neutral."""

    form_field: str = "structured_outputs"
    """Field by which the client asked for the form of the answers, for errors."""
    max_tokens_field: str = ""
    """Field by which the client asked for ``max_tokens``, which then must fit in the context beside the prompt. Empty: the answer is
    cut where the context ends."""

    def ends(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end an answer: the request's own, and those of the checkpoint unless it ignores them."""
        stops = self.sampling.stop_token_ids
        if self.sampling.ignore_eos:
            return frozenset(stops)
        return eos_token_ids.union(stops) if stops else eos_token_ids


class FinishedBeam(msgspec.Struct, frozen=True, array_like=True):
    """An answer of a beam search."""

    score: float
    """Sum of its tokens' log-probabilities over its length to the power of the length penalty."""
    token_ids: list[int]
    finish_reason: FinishReason


class AnswerUpdate(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """News of one answer of a request."""

    index: int
    """Number of the answer among the request's."""
    token_ids: list[int] = []
    """New tokens; none with beam search, whose answers are known at the end."""
    logprobs: list[TokenLogprobs] = []
    """For the new tokens, where the request asks for them."""
    finish_reason: FinishReason | None = None
    """Set with the last token."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the KV cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """With the first answer's first token, where the request asks for them."""
    beams: list[FinishedBeam] = []
    """At the end of a beam search, the best first."""
    embedding: list[float] | None = None
    """At the end of a request that is pooled."""
    num_drafted: int = 0
    """Tokens that were drafted for the answer since the last update."""
    num_accepted: int = 0
    """Number of these that were right: the first ones of ``token_ids``."""
    queue_seconds: float | None = None
    """From the answer's arrival at the engine until it was first run; with its first token, beams or vector."""
    error: str = ""
    """Why the engine broke the answer off, where ``finish_reason`` is ``ABORT``."""
