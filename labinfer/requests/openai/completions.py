"""OpenAI's completion objects and chunks (API reference, "Completions"), built from engine outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from labinfer.base.plan import TokenLogprobs
from labinfer.requests.openai.api_object import (
    ApiObject,
    Count,
    FinishReason,
    PromptLogprobs,
    Usage,
    or_unset,
    prompt_logprobs,
    token_text,
)
from labinfer.requests.outputs import Completion, Delta, RequestOutput
from labinfer.text.token_offsets import TokenOffsets
from labinfer.text.tokenizer import Tokenizer

COMPLETION_PREFIX = "cmpl-"
"""Prefix of the ids of completions."""


class TextLogprobs(ApiObject):
    """Logprobs of the tokens of an answer (with ``echo``, also of the prompt). The first token of a prompt has null, as it has no
    context."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextChoice(ApiObject, kw_only=True):
    """An answer of a completion: text, logprobs and finish reason. The fields after ``finish_reason`` are not in
    OpenAI's API."""

    index: Count
    text: str | None
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | UnsetType = UNSET
    score: float | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[Count] | UnsetType = UNSET
    """Token ids of the answer, in the output of a job with ``--reproducible``."""


class TextCompletion(ApiObject, kw_only=True):
    """Complete response of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    system_fingerprint: str
    choices: Annotated[list[TextChoice], msgspec.Meta(min_length=1)]
    usage: Usage


class TextChunkChoice(ApiObject, kw_only=True):
    """Part of an answer that one chunk of a stream adds. The fields after ``finish_reason`` are not in OpenAI's API. If the
    checkpoint has no tokenizer, there are ``token_ids`` and no text."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[Count] | UnsetType = UNSET
    stop_reason: str | int | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletionChunk(ApiObject, kw_only=True):
    """Chunk (event) of a streamed completion. ``usage`` is present only with ``stream_options``, and null in chunks without a
    report."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Count
    model: str
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    choices: list[TextChunkChoice]


@dataclass(frozen=True)
class Echo:
    """Text, token ids and logprobs of a prompt, with which an answer begins if the request has ``echo``."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


Answered = TypeVar("Answered", Completion, Delta)


def without_tokens(output: RequestOutput) -> RequestOutput:
    """Copy of ``output`` with empty answers, for a request with ``echo`` and ``max_tokens=0``, which gets only its prompt."""
    return replace(output, completions=list(map(emptied, output.completions)), num_output_tokens=0)


def emptied(answer: Answered) -> Answered:
    """Copy of ``answer``, a completion or a delta, with empty text and without tokens."""
    return replace(
        answer,
        text=answer.text and "",
        token_ids=[],
        finish_reason=answer.finish_reason and "length",
        stop_reason=None,
        logprobs=None if answer.logprobs is None else [],
        drafted=[],
    )


def text_choice(
    completion: Completion, output: RequestOutput, tokenizer: Tokenizer | None, echo: Echo | None, index: int
) -> TextChoice:
    """Make the choice object of ``completion``, an answer of ``output``. With ``echo``, the text and logprobs begin with those of
    the prompt."""
    text, logprobs = completion.text, None
    if echo is not None and text is not None:
        text = echo.text + text
    if completion.logprobs is not None:
        logprobs = text_logprobs(completion.token_ids, completion.logprobs, tokenizer, echo)
    return TextChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=or_unset(completion.stop_reason),
        score=or_unset(completion.score),
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs, tokenizer),
    )


def text_logprobs(
    token_ids: list[int],
    measured: list[TokenLogprobs],
    tokenizer: Tokenizer | None,
    echo: Echo | None = None,
    offsets: TokenOffsets | None = None,
) -> TextLogprobs:
    """Logprobs of tokens, with each token's text and its offset in the text.

    Args:
        echo: the prompt, if ``token_ids`` begin an answer with ``echo``.
        offsets: counter of text offsets that has read all tokens before ``token_ids``; None if ``token_ids`` begin an
            answer.
    """
    offsets = offsets or TokenOffsets(tokenizer)
    logprobs: list[TokenLogprobs | None] = list(measured)
    tokens, begins = [], []
    if echo is not None:
        logprobs = [None, *(echo.logprobs or []), *logprobs]  # the first token of a prompt has no context
        tokens, begins = offsets.read_prompt(echo.token_ids, echo.text)
    more_tokens, more_begins = offsets.read(token_ids)
    return TextLogprobs(
        tokens=tokens + more_tokens,
        token_logprobs=[token and token.logprob for token in logprobs],
        top_logprobs=[token and _top_by_text(token, tokenizer) for token in logprobs],
        text_offset=begins + more_begins,
    )


def _top_by_text(token: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Logprobs of the most likely tokens and of the sampled one, by token text. Of two tokens with equal text, the
    likelier one counts."""
    by_text: dict[str, float] = {}
    for token_id, logprob in [*token.top.items(), (token.token_id, token.logprob)]:  # sorted by falling logprob
        by_text.setdefault(token_text(token_id, tokenizer).token, logprob)
    return by_text
