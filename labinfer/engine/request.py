"""Request, and AnswerUpdate: the engine's incremental output of an answer."""

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
    """A tokenized prompt with its sampling parameters."""

    key: Any
    """The caller's identifier of the request."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    prompt: str | None = None
    """Text of the prompt, for outputs only; None if it was given as token ids, or the output does not need it."""
    output_token_ids: tuple[int, ...] = ()
    """Output tokens of an interrupted answer; generation resumes after them as if never interrupted."""
    cache_salt: str = ""
    """Prefix-cache salt: only requests with equal salts share KV blocks."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """``SamplingParams.bad_words`` as token ids."""
    priority: int = 0
    """Priority for ``--scheduling-policy priority``; the lowest is first."""
    user: str = ""
    """User for ``--scheduling-policy fair``, which takes the users in turn."""
    is_chat: bool = False
    """Whether the answers are chat replies, which are parsed into reasoning, content and tool calls by delimiters in the text."""
    continues_message: bool = False
    """Whether chat replies continue a message that the prompt has begun, so that leading whitespace is kept."""
    before_form: str = ""
    """With structured outputs: grammar rules of the text before the constrained part, such as reasoning; see ``text/reply_grammar.py``."""
    pooling: str = ""
    """Pooling of the prompt's hidden states into a vector, one of ``plan.POOLINGS``. Nothing is sampled, and
    ``sampling`` has its defaults. Empty for generation."""

    form_field: str = "structured_outputs"
    """Request field that asks for structured outputs, for error texts."""
    max_tokens_field: str = ""
    """Request field that sets ``max_tokens``, which must then fit in the context beside the prompt. Empty: the answer
    is cut at the end of the context."""

    def ends(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Stop token ids: those of the request, and the checkpoint's unless the request ignores them."""
        stops = self.sampling.stop_token_ids
        if self.sampling.ignore_eos:
            return frozenset(stops)
        return eos_token_ids.union(stops) if stops else eos_token_ids


class FinishedBeam(msgspec.Struct, frozen=True, array_like=True):
    """Finished answer of a beam search."""

    score: float
    """Sum of the tokens' log-probabilities, divided by the number of tokens to the power of the length penalty."""
    token_ids: list[int]
    finish_reason: FinishReason


class AnswerUpdate(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Update of one answer of a request: the tokens and events since the last update."""

    index: int
    """Index of the answer within the request."""
    token_ids: list[int] = []
    """New tokens; empty with beam search, see ``beams``."""
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of the new tokens, if requested."""
    finish_reason: FinishReason | None = None
    """Why the answer ended; set only in its last update."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt, if requested; sent with the first answer's first token."""
    beams: list[FinishedBeam] = []
    """Answers of a beam search, best first; sent at the end of the search."""
    embedding: list[float] | None = None
    """Vector of a pooled request; sent at the end of the request."""
    num_drafted: int = 0
    """Drafted tokens that were verified since the last update."""
    num_accepted: int = 0
    """Drafted tokens accepted since the last update: the first ones of ``token_ids``."""
    queue_seconds: float | None = None
    """Seconds from arrival until first admitted; sent with the first token, the beams or the vector."""
    error: str = ""
    """Reason why the engine aborted the answer, if ``finish_reason`` is ``ABORT``."""
