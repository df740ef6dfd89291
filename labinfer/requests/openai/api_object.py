"""ApiObject: the base of every JSON object that the API answers with, and the parts that several kinds of answers share."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from labinfer.base.plan import TokenLogprobs
from labinfer.requests.outputs import RequestOutput, RequestState
from labinfer.text.spelling import Spelling, unnamed
from labinfer.text.tokenizer import Tokenizer

Count = Annotated[int, msgspec.Meta(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
Value = TypeVar("Value")


class ApiObject(msgspec.Struct, frozen=True, gc=False):
    """A JSON object in an answer. Every field is there, null where it is None, but for those that are ``UNSET``.

    ``/openapi.json`` is made of these structs: see ``server/gateway/openapi.py``.
    """


class ListPage(ApiObject, kw_only=True):
    """A part of a list, beside its items; see ``server/gateway/page.py``."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class CachedTokens(ApiObject):
    """Prompt tokens that were in the KV cache."""

    cached_tokens: Count


class CompletionDetails(ApiObject):
    """Numbers of particular tokens."""

    reasoning_tokens: Count | UnsetType = UNSET
    """Tokens of thoughts, their marks included; told of conversations only, as in other calls thoughts are not read apart."""
    accepted_prediction_tokens: Count | UnsetType = UNSET
    """Tokens that were drafted, and right; there where tokens were drafted."""
    rejected_prediction_tokens: Count | UnsetType = UNSET
    """Tokens that were drafted and wrong: they are not in the answer, and not among ``completion_tokens``."""
    steps: Count | UnsetType = UNSET
    """Steps of the model that ``completion_tokens`` came with; there where tokens were drafted. Not OpenAI's."""


class Usage(ApiObject):
    """Numbers of tokens of a whole call."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class PromptLogprob(ApiObject):
    """Log-probability of a prompt token, or of one that might have stood in its place."""

    logprob: float
    rank: Annotated[int, msgspec.Meta(ge=1)]
    """Place of the token among all by log-probability."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Log-probabilities of a prompt in vLLM's form. One entry for each token: its log-probability and those of the likeliest tokens, by token
id; null for the first token, which follows nothing."""


class PlainLogprob(ApiObject):
    """Log-probability of one token and of the likeliest ones, by their ids."""

    token_id: Count
    logprob: float
    top: dict[int, float]


def or_unset(value: Value | None) -> Value | UnsetType:
    """``value``, and a field that is not there for None."""
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
    """Token counts of a call. ``reasoning`` is None if reasoning content is not told apart; ``steps`` are the steps that verified drafts."""
    details = UNSET
    if reasoning is not None or drafted:
        predictions = (accepted, drafted - accepted, steps) if drafted else ()
        details = CompletionDetails(or_unset(reasoning), *predictions)
    return Usage(prompt_tokens, generated, prompt_tokens + generated, CachedTokens(cached), details)


def total_usage(outputs: list[RequestOutput] | list[RequestState], reasoning: int | None = None) -> Usage:
    """The usage of a call with these outputs or states, one for each of its prompts."""
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
    """Log-probabilities of tokens by their ids."""
    return [PlainLogprob(token.token_id, token.logprob, token.top) for token in measured]


def prompt_logprobs(measured: list[TokenLogprobs] | None, tokenizer: Tokenizer | None) -> PromptLogprobs | UnsetType:
    """The field ``prompt_logprobs`` of an answer, which is there where a request asks for it."""
    if measured is None:
        return UNSET
    entries: PromptLogprobs = [None]
    for token in measured:
        logprobs = {token.token_id: (token.logprob, token.rank)}
        logprobs |= {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top.items(), 1)}
        logprobs[token.token_id] = token.logprob, token.rank  # also where likely tokens are equally likely
        entries.append(
            {
                token_id: PromptLogprob(logprob, rank, spell(token_id, tokenizer).token)
                for token_id, (logprob, rank) in logprobs.items()
            }
        )
    return entries


def spell(token_id: int, tokenizer: Tokenizer | None) -> Spelling:
    """Text, length and bytes of a token alone; its id in words where the checkpoint has no tokenizer."""
    return tokenizer.spell(token_id) if tokenizer else unnamed(token_id)
