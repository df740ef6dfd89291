"""Anthropic's message objects and stream events (API reference, "Messages", "Streaming messages")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from labinfer.requests.openai.api_object import ApiObject, Count, Usage
from labinfer.text.reply_parts import Content, Event, Reasoning, ToolCall

MESSAGE_PREFIX = "msg_"
"""Prefix of message ids."""
SIGNATURE = "unsigned"
"""Signature of every thinking block, as clients drop thinking blocks without a signature. When a client sends it back, it is not
checked."""
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(ApiObject, tag_field="type", tag="text"):
    """Content block of a message with text of the answer."""

    text: str


class ThinkingBlock(ApiObject, tag_field="type", tag="thinking"):
    """Content block of a message with the model's reasoning, in full."""

    thinking: str
    signature: str


class ToolUseBlock(ApiObject, tag_field="type", tag="tool_use"):
    """Content block of a message with a tool call; ``input`` has its arguments."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(ApiObject):
    """Number of reasoning tokens, including delimiters."""

    thinking_tokens: Count


class MessageUsage(ApiObject, kw_only=True):
    """Token counts of a message. The length of the prompt is ``input_tokens`` plus ``cache_read_input_tokens``."""

    input_tokens: Count
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingTokens


class AnthropicMessage(ApiObject, kw_only=True, tag_field="type", tag="message"):
    """Complete response of ``/v1/messages``."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(ApiObject):
    """Response of ``/v1/messages/count_tokens``: length of a prompt in tokens."""

    input_tokens: Count


class MessageStart(ApiObject, tag_field="type", tag="message_start"):
    """First event of a stream: the message, without content yet."""

    message: AnthropicMessage


class BlockStart(ApiObject, tag_field="type", tag="content_block_start"):
    """Stream event: a content block begins."""

    index: Count
    content_block: AnswerBlock


class TextDelta(ApiObject, tag_field="type", tag="text_delta"):
    """Data of a ``BlockDelta``: next piece of a text block."""

    text: str


class ThinkingDelta(ApiObject, tag_field="type", tag="thinking_delta"):
    """Data of a ``BlockDelta``: next piece of a thinking block."""

    thinking: str


class SignatureDelta(ApiObject, tag_field="type", tag="signature_delta"):
    """Data of a ``BlockDelta``: signature of a thinking block, sent at its end."""

    signature: str


class InputDelta(ApiObject, tag_field="type", tag="input_json_delta"):
    """Data of a ``BlockDelta``: input of a tool call as JSON text, sent in one piece."""

    partial_json: str


class BlockDelta(ApiObject, tag_field="type", tag="content_block_delta"):
    """Stream event: ``delta`` is added to a content block."""

    index: Count
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(ApiObject, tag_field="type", tag="content_block_stop"):
    """Stream event: a content block ends."""

    index: Count


class Ending(ApiObject):
    """Stop reason of an answer, and the stop sequence that ended it."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ApiObject, tag_field="type", tag="message_delta"):
    """Stream event: the answer has ended; with its stop reason and token counts."""

    delta: Ending
    usage: MessageUsage


class MessageStop(ApiObject, tag_field="type", tag="message_stop"):
    """Last event of a stream."""


class Ping(ApiObject, tag_field="type", tag="ping"):
    """Stream event without data, sent at times to keep an idle connection open."""


STREAM_EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping)


class MessageWriter:
    """Builds an Anthropic message from the events of a parsed reply, and yields its stream events on the way. Callers
    that need only ``message`` discard the stream events.

    Args:
        shows_reasoning: whether to include the reasoning.
    """

    def __init__(self, id: str, model: str, usage: Usage, shows_reasoning: bool):
        self.message = AnthropicMessage(id=id, model=model, usage=message_usage(usage))
        """The message as built so far."""
        self._shows_reasoning = shows_reasoning
        self._blocks: list[AnswerBlock] = []  # content blocks that are complete
        self._open: type[Reasoning] | type[Content] | None = None
        self._pieces: list[str] = []  # pieces of text of the open content block

    def begin(self) -> Iterator[ApiObject]:
        """Yield the stream events that precede the first token."""
        yield MessageStart(self.message)

    def add(self, events: list[Event]) -> Iterator[ApiObject]:
        """Convert events of a parsed reply to stream events."""
        for event in events:
            if isinstance(event, ToolCall):
                yield from self._call(event)
            elif self._shows_reasoning or not isinstance(event, Reasoning):
                yield from self._write(event)

    def end(self, stop_reason: StopReason, stop_sequence: str | None, usage: Usage) -> Iterator[ApiObject]:
        """Yield the stream events that follow the last token."""
        yield from self._close()
        if all(isinstance(block, ThinkingBlock) for block in self._blocks):
            yield from self._begin(Content)  # clients expect at least one text block in a message
            yield from self._close()
        self.message = msgspec.structs.replace(
            self.message,
            content=self._blocks,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=message_usage(usage),
        )
        yield MessageDelta(Ending(stop_reason, stop_sequence), self.message.usage)
        yield MessageStop()

    def _write(self, event: Reasoning | Content) -> Iterator[ApiObject]:
        if self._open is not type(event):
            yield from self._close()
            yield from self._begin(type(event))
        self._pieces.append(event.text)
        delta = ThinkingDelta(event.text) if isinstance(event, Reasoning) else TextDelta(event.text)
        yield BlockDelta(len(self._blocks), delta)

    def _begin(self, kind: type[Reasoning] | type[Content]) -> Iterator[ApiObject]:
        self._open, self._pieces = kind, []
        yield BlockStart(len(self._blocks), ThinkingBlock("", "") if kind is Reasoning else TextBlock(""))

    def _close(self) -> Iterator[ApiObject]:
        """Yield the stream events that end the open content block, if any."""
        if self._open is None:
            return
        index, text = len(self._blocks), "".join(self._pieces)
        if self._open is Reasoning:
            yield BlockDelta(index, SignatureDelta(SIGNATURE))
        yield BlockStop(index)
        self._blocks.append(ThinkingBlock(text, SIGNATURE) if self._open is Reasoning else TextBlock(text))
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[ApiObject]:
        yield from self._close()
        index = len(self._blocks)
        arguments = call.arguments + call.closing  # JSON of a complete object, even if the reply was truncated
        yield BlockStart(index, ToolUseBlock(call.id, call.name, {}))
        yield BlockDelta(index, InputDelta(arguments))
        yield BlockStop(index)
        self._blocks.append(ToolUseBlock(call.id, call.name, msgspec.json.decode(arguments)))


def stop_reason(finish_reason: str, stopped_by: str | int | None) -> tuple[StopReason, str | None]:
    """Stop reason in Anthropic's terms, and the stop sequence that ended the answer, if any.

    Args:
        finish_reason: OpenAI's finish reason.
        stopped_by: the stop string, or the id of the stop token.
    """
    if finish_reason == "stop" and isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[finish_reason], None


def message_usage(usage: Usage) -> MessageUsage:
    """Convert token counts to Anthropic's fields."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokens(usage.completion_tokens_details.reasoning_tokens),
    )
