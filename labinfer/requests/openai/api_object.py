"""ApiObject: the base class of all JSON objects in responses; and objects that several kinds of responses share."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from labinfer.base.plan import TokenLogprobs
from labinfer.requests.outputs import RequestOutput, RequestState
from labinfer.text.token_text import TokenText, unnamed_token
from labinfer.text.tokenizer import Tokenizer

Count = Annotated[int, msgspec.Meta(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
Value = TypeVar("Value")


class ApiObject(msgspec.Struct, frozen=True, gc=False):
    """A JSON object in a response. None is encoded as null; a field is omitted only if it is ``UNSET``.

    ``/openapi.json`` is generated from these structs: see ``server/gateway/openapi.py``.
    """


class ListPage(ApiObject, kw_only=True):
    """Fields that every paginated list has in addition to its items; see ``server/gateway/page.py``."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class CachedTokens(ApiObject):
    """Details of ``Usage.prompt_tokens``: number of prefix-cache hits."""

    cached_tokens: Count


class CompletionDetails(ApiObject):
    """Details of ``Usage.completion_tokens``: numbers of reasoning tokens and draft tokens."""

    reasoning_tokens: Count | UnsetType = UNSET
    """Number of reasoning tokens, including delimiters. Set for chat only, as other endpoints do not parse reasoning."""
    accepted_prediction_tokens: Count | UnsetType = UNSET
    """Number of accepted draft tokens (speculative decoding); set if tokens were drafted."""
    rejected_prediction_tokens: Count | UnsetType = UNSET
    """Number of rejected draft tokens, which are neither in the answer nor in ``completion_tokens``; set if tokens were
    drafted."""
    steps: Count | UnsetType = UNSET
    """Number of engine steps that produced ``completion_tokens``; set if tokens were drafted. LABInfer's extension of
    the API."""


class Usage(ApiObject):
    """Token counts of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class PromptLogprob(ApiObject):
    """Logprob of a prompt token, or of an alternative at its position."""

    logprob: float
    rank: Annotated[int, msgspec.Meta(ge=1)]
    """Position of the token in the vocabulary sorted by logprob, most likely first; from 1."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Prompt logprobs in vLLM's format. One entry per prompt token: logprobs of the token and of the most likely tokens at its
position, by token id. The entry of the first token is null, as that token has no context."""


class PlainLogprob(ApiObject):
    """Logprobs of one token and of the most likely tokens, by token id."""

    token_id: Count
    logprob: float
    top: dict[int, float]


def or_unset(value: Value | None) -> Value | UnsetType:
    """Return ``value``, or ``UNSET`` for None, so that the field is left out of the response."""
    return UNSET if value is None else value


def count_usage(
    prompt_tokens: int,
    generated: int,
    cached: int,
    reasoning: int | None = None,
    *,
    drafted: int = 0,
    accepted: int = 0,
    steps: int = 0,
) -> Usage:
    """Token counts of a request. ``reasoning`` is None if the endpoint does not parse reasoning. ``steps`` is the number of engine
    steps, 0 if no tokens were drafted."""
    details = UNSET
    if reasoning is not None or drafted:
        predictions = (accepted, drafted - accepted, steps) if drafted else ()
        details = CompletionDetails(or_unset(reasoning), *predictions)
    return Usage(prompt_tokens, generated, prompt_tokens + generated, CachedTokens(cached), details)


def total_usage(outputs: list[RequestOutput] | list[RequestState], reasoning: int | None = None) -> Usage:
    """Token counts of a request with ``outputs`` (outputs or states), one per prompt."""
    return count_usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_output_tokens for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        reasoning,
        drafted=sum(output.num_drafted_tokens for output in outputs),
        accepted=sum(output.num_accepted_tokens for output in outputs),
        steps=sum(output.num_steps for output in outputs),
    )


def plain_logprobs(measured: list[TokenLogprobs]) -> list[PlainLogprob]:
    """Convert logprobs of tokens to response objects, with token ids in place of texts."""
    return [PlainLogprob(token.token_id, token.logprob, token.top) for token in measured]


def prompt_logprobs(measured: list[TokenLogprobs] | None, tokenizer: Tokenizer | None) -> PromptLogprobs | UnsetType:
    """Value of the response field ``prompt_logprobs``; ``UNSET`` if the request does not ask for it."""
    if measured is None:
        return UNSET
    entries: PromptLogprobs = [None]
    for token in measured:
        logprobs = {token.token_id: (token.logprob, token.rank)}
        logprobs |= {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top.items(), 1)}
        logprobs[token.token_id] = token.logprob, token.rank  # not its rank in ``top``: with ties they differ
        entries.append(
            {
                token_id: PromptLogprob(logprob, rank, token_text(token_id, tokenizer).token)
                for token_id, (logprob, rank) in logprobs.items()
            }
        )
    return entries


def token_text(token_id: int, tokenizer: Tokenizer | None) -> TokenText:
    """Text, length and bytes of one token. Without a tokenizer, the text is a placeholder that contains the id."""
    return tokenizer.token_text(token_id) if tokenizer else unnamed_token(token_id)
