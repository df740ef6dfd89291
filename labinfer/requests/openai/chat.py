"""OpenAI's chat completion objects and chunks (API reference, "Chat"), built from engine outputs."""

from __future__ import annotations

from typing import Annotated, Literal

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
    token_text,
    total_usage,
)
from labinfer.requests.outputs import Completion, RequestOutput
from labinfer.text.reply_parts import Event, Reasoning, ToolCall, join_events
from labinfer.text.reply_reader import ReplyReader
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tools import ToolUse

CHAT_PREFIX = "chatcmpl-"
"""Prefix of the ids of chat completions."""
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class FunctionCallAnswer(ApiObject):
    """Function name and arguments of a tool call. The arguments are JSON in a string."""

    name: str
    arguments: str


class ToolCallAnswer(ApiObject):
    """A complete tool call of the assistant's message."""

    id: str
    type: Literal["function"]
    function: FunctionCallAnswer


class ChatMessage(ApiObject):
    """The assistant's message in a choice of a chat completion."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: Annotated[list[ToolCallAnswer], msgspec.Meta(min_length=1)] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """Reasoning of the model; not in OpenAI's API."""
    reasoning_content: str | UnsetType = UNSET
    """The text of ``reasoning``, under its older name."""
    function_call: FunctionCallAnswer | UnsetType = UNSET
    """Function call, for a request with ``functions``."""
    refusal: None = None
    """Always null: a model's refusal is ordinary content."""


class SpelledLogprob(ApiObject):
    """Logprob of a token that was an alternative to a generated token."""

    token: str
    logprob: float
    bytes: list[Byte] | None


class ChosenLogprob(SpelledLogprob):
    """Logprob of a generated token, and of the most likely alternatives."""

    top_logprobs: list[SpelledLogprob]


class ChatLogprobs(ApiObject):
    """Logprobs of the tokens of an answer or of a chunk."""

    content: list[ChosenLogprob]
    refusal: None = None


class AnswerToken(ApiObject):
    """A token of an answer, and whether it was drafted. Not in OpenAI's API."""

    token: str
    bytes: list[Byte] | None
    """UTF-8 bytes of the token, maybe only a part of a character; null if unknown."""
    drafted: bool
    """Whether the token is an accepted draft token."""


class ChatChoice(ApiObject, kw_only=True):
    """An answer of a chat completion: message, logprobs and finish reason. The fields after ``finish_reason`` are not
    in OpenAI's API."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | UnsetType = UNSET
    score: float | UnsetType = UNSET
    tokens: list[AnswerToken] | UnsetType = UNSET
    token_ids: list[Count] | UnsetType = UNSET
    """Token ids of the answer, in the output of a job with ``--reproducible``."""


class ChatCompletion(ApiObject, kw_only=True):
    """Complete response of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Count
    model: str
    system_fingerprint: str
    choices: Annotated[list[ChatChoice], msgspec.Meta(min_length=1)]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Log-probabilities of the prompt's tokens, if requested; an extension of OpenAI's API."""


class ToolCallDelta(ApiObject, kw_only=True):
    """A tool call in a stream, sent in one piece; ``index`` is its number in the answer."""

    index: Count
    id: str
    type: Literal["function"] = "function"
    function: FunctionCallAnswer


class ChatDelta(ApiObject):
    """Part of the assistant's message that one chunk of a stream adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    function_call: FunctionCallAnswer | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    """Null in the first delta of an answer, absent in all others. A model's refusal is ordinary content."""


class ChatChunkChoice(ApiObject, kw_only=True):
    """Part of an answer that one chunk of a stream adds. The fields after ``finish_reason`` are not in OpenAI's API."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    tokens: list[AnswerToken] | UnsetType = UNSET


class ChatCompletionChunk(ApiObject, kw_only=True):
    """Chunk (event) of a streamed chat completion. ``usage`` is present only with ``stream_options``, and null in chunks without a
    report."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Count
    model: str
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Log-probabilities of the prompt's tokens, sent in one of the first chunks; not in OpenAI's API."""


def first_delta(delta: ChatDelta) -> ChatDelta:
    """Copy of ``delta`` as the first delta of an answer: with the role, and with empty content if all other fields are
    unset."""
    is_empty = delta == ChatDelta()
    content = "" if is_empty else delta.content
    return msgspec.structs.replace(delta, role="assistant", content=content, refusal=None)


def chat_messages(
    output: RequestOutput, tokenizer: Tokenizer | None, tool_use: ToolUse, include_reasoning: bool = True
) -> tuple[list[ChatMessage], Usage]:
    """Parse the answers of a request into reasoning, tool calls and content. Returns the message of each answer, and
    the usage.

    Args:
        include_reasoning: whether the messages include the reasoning.
    """
    messages, num_reasoning_tokens = [], 0
    for completion in output.completions:
        reader = ReplyReader(tokenizer, output.prompt_token_ids, tool_use)
        messages.append(_read_message(completion, reader, include_reasoning))
        num_reasoning_tokens += reader.num_reasoning_tokens(completion.token_ids)
    return messages, total_usage([output], num_reasoning_tokens)


def chat_choice(
    completion: Completion,
    message: ChatMessage,
    output: RequestOutput,
    tokenizer: Tokenizer | None,
    lists_tokens: bool = False,
) -> ChatChoice:
    """Make the choice object of ``completion``, an answer of ``output``, with ``message``, the answer after parsing."""
    finish_reason = completion.finish_reason
    if finish_reason == "stop" and message.tool_calls is not UNSET:
        finish_reason = "tool_calls"
    elif finish_reason == "stop" and message.function_call is not UNSET:
        finish_reason = "function_call"
    return ChatChoice(
        index=completion.index,
        message=message,
        logprobs=None if completion.logprobs is None else chat_logprobs(completion.logprobs, tokenizer),
        finish_reason=finish_reason,
        stop_reason=or_unset(completion.stop_reason),
        score=or_unset(completion.score),
        tokens=answer_tokens(completion.token_ids, completion.drafted, tokenizer) if lists_tokens else UNSET,
    )


def _read_message(completion: Completion, reader: ReplyReader, include_reasoning: bool) -> ChatMessage:
    if completion.text is None:
        return ChatMessage("assistant", None)
    reply = join_events(reader.read(completion.text, completion.finish_reason))
    reasoning = (include_reasoning and reply.reasoning) or UNSET
    calls, has_functions = [tool_call(call) for call in reply.calls], reader.has_functions
    return ChatMessage(
        role="assistant",
        content=(reply.content or None) if calls else reply.content,
        tool_calls=UNSET if has_functions else calls or UNSET,
        reasoning=reasoning,
        reasoning_content=reasoning,
        function_call=calls[0].function if calls and has_functions else UNSET,
    )


def tool_call(call: ToolCall) -> ToolCallAnswer:
    """Convert a complete tool call to OpenAI's format."""
    return ToolCallAnswer(call.id, "function", FunctionCallAnswer(call.name, call.arguments))


def chat_logprobs(measured: list[TokenLogprobs], tokenizer: Tokenizer | None) -> ChatLogprobs:
    """Logprobs of tokens, with the text of each token."""
    content = []
    for token in measured:
        top = [SpelledLogprob(*_logprob_entry(token_id, logprob, tokenizer)) for token_id, logprob in token.top.items()]
        content.append(ChosenLogprob(*_logprob_entry(token.token_id, token.logprob, tokenizer), top))
    return ChatLogprobs(content)


def answer_tokens(token_ids: list[int], drafted: list[bool], tokenizer: Tokenizer | None) -> list[AnswerToken]:
    """List the tokens of an answer, each with whether it was an accepted draft token."""
    shown = [token_text(token_id, tokenizer) for token_id in token_ids]
    return [
        AnswerToken(token.token, token.bytes and list(token.bytes), is_drafted)
        for token, is_drafted in zip(shown, drafted, strict=True)
    ]


def reply_delta(event: Event, num_calls: int, has_functions: bool = False) -> ChatDelta:
    """Convert an event of a parsed reply to a delta of the message. ``num_calls`` is the number of tool calls that precede the
    event in the reply.

    Args:
        has_functions: whether the request has the deprecated ``functions`` instead of ``tools``.
    """
    if isinstance(event, ToolCall):
        function = FunctionCallAnswer(event.name, event.arguments)
        if has_functions:
            return ChatDelta(function_call=function)
        return ChatDelta(tool_calls=[ToolCallDelta(index=num_calls, id=event.id, function=function)])
    if isinstance(event, Reasoning):
        return ChatDelta(reasoning=event.text, reasoning_content=event.text)
    return ChatDelta(content=event.text)


def _logprob_entry(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> tuple[str, float, list[int] | None]:
    token = token_text(token_id, tokenizer)
    return token.token, logprob, token.bytes and list(token.bytes)
