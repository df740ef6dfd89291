"""Stream events of the Responses API (OpenAI's API reference, "Streaming events"), and ResponseWriter, which makes them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from labinfer.base.plan import TokenLogprobs
from labinfer.requests.openai.api_object import ApiObject, Count, FinishReason, Usage, token_text
from labinfer.requests.openai.response_items import new_id
from labinfer.requests.openai.responses import (
    IncompleteDetails,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Response,
    ResponseFailure,
    ResponseLogprob,
    ResponseLogprobTop,
    response_usage,
)
from labinfer.text.reply_parts import Content, Event, Reasoning, ToolCall
from labinfer.text.tokenizer import Tokenizer


class StreamEvent(ApiObject, tag_field="type", kw_only=True):
    """Base class of all stream events, with the number of the event in its stream."""

    sequence_number: Count


class ResponseEvent(StreamEvent):
    """Base class of stream events that contain the whole response."""

    response: Response


class ResponseCreated(ResponseEvent, tag="response.created"):
    """First event of a stream, with the response, which has no output yet."""


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    """Second event of a stream, sent at once after ``ResponseCreated``."""


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    """Last event of a complete response."""


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    """Last event of a truncated response."""


class ResponseFailed(ResponseEvent, tag="response.failed"):
    """Last event of a failed response."""


class ItemEvent(StreamEvent, kw_only=True):
    """Base class of stream events that contain a whole output item."""

    output_index: Count
    item: OutputItem


class OutputItemAdded(ItemEvent, tag="response.output_item.added"):
    """Stream event: an output item begins."""


class OutputItemDone(ItemEvent, tag="response.output_item.done"):
    """Stream event: an output item ends."""


class InItemEvent(StreamEvent, kw_only=True):
    """Base class of stream events about a part of an output item, with the id and index of the item."""

    item_id: str
    output_index: Count


class PartEvent(InItemEvent, kw_only=True):
    """Base class of stream events that contain a whole content part of an output item."""

    content_index: Count = 0
    part: OutputText | ReasoningText


class ContentPartAdded(PartEvent, tag="response.content_part.added"):
    """Stream event: a content part begins."""


class ContentPartDone(PartEvent, tag="response.content_part.done"):
    """Stream event: a content part ends."""


class OutputTextDelta(InItemEvent, tag="response.output_text.delta", kw_only=True):
    """Stream event: the next piece of a message's text."""

    content_index: Count = 0
    delta: str
    logprobs: list[ResponseLogprob]


class OutputTextDone(InItemEvent, tag="response.output_text.done", kw_only=True):
    """Stream event: the whole text of a message."""

    content_index: Count = 0
    text: str
    logprobs: list[ResponseLogprob]


class ReasoningTextDelta(InItemEvent, tag="response.reasoning_text.delta", kw_only=True):
    """Stream event: the next piece of reasoning."""

    content_index: Count = 0
    delta: str


class ReasoningTextDone(InItemEvent, tag="response.reasoning_text.done", kw_only=True):
    """Stream event: the whole text of a reasoning item."""

    content_index: Count = 0
    text: str


class ArgumentsDelta(InItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """Stream event: the arguments of a function call, sent in one piece."""

    delta: str


class ArgumentsDone(InItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    """Stream event: the arguments of a function call are complete."""

    name: str
    arguments: str


STREAM_EVENTS = (
    ResponseCreated,
    ResponseInProgress,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    OutputItemAdded,
    OutputItemDone,
    ContentPartAdded,
    ContentPartDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ArgumentsDelta,
    ArgumentsDone,
)


class ResponseWriter:
    """Builds the output of a response from the events of a parsed reply, and yields the stream events of the response on the way.
    Callers that need only ``response`` discard the stream events."""

    def __init__(self, response: Response, tokenizer: Tokenizer | None):
        self.response, self._tokenizer = response, tokenizer
        """The response as built so far."""
        self._number = -1  # sequence number of the last stream event
        self._output: list[OutputItem] = []
        self._text: list[str] | None = None  # pieces of text of the open message or reasoning item
        self._is_reasoning = False
        self._id = ""
        self._logprobs: list[ResponseLogprob] = []
        """Logprobs of the tokens of the message item that is open."""
        self._new_logprobs: list[ResponseLogprob] = []

    def begin(self) -> Iterator[StreamEvent]:
        """Yield the stream events that precede the first token."""
        yield ResponseCreated(sequence_number=self._next(), response=self.response)
        yield ResponseInProgress(sequence_number=self._next(), response=self.response)

    def add(self, events: list[Event], measured: list[TokenLogprobs] | None) -> Iterator[StreamEvent]:
        """Convert events of a parsed reply to stream events. ``measured`` has the logprobs of the tokens, if requested."""
        self._new_logprobs += [self._logprob(token) for token in measured or ()]
        for event in events:
            if isinstance(event, ToolCall):
                yield from self._call(event)
            else:
                yield from self._write(event)

    def end(self, finish_reason: FinishReason, usage: Usage, now: int) -> Iterator[StreamEvent]:
        """Yield the stream events that follow the last token; ``now`` is in seconds since 1970."""
        is_cut = finish_reason == "length"
        status: ItemStatus = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        if not is_cut and all(isinstance(item, OutputReasoning) for item in self._output):
            yield from self._open(Content)  # clients expect at least one message item
            yield from self._close(status)
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=None if is_cut else now,
            incomplete_details=IncompleteDetails() if is_cut else None,
            output=self._output,
            usage=response_usage(usage),
        )
        kind = ResponseIncomplete if is_cut else ResponseCompleted
        yield kind(sequence_number=self._next(), response=self.response)

    def fail(self, message: str) -> ResponseFailed:
        """Make the last event of a response that fails with ``message``."""
        failure = ResponseFailure("server_error", message)
        self.response = msgspec.structs.replace(
            self.response, status="failed", error=failure, output=list(self._output)
        )
        return ResponseFailed(sequence_number=self._next(), response=self.response)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _write(self, event: Reasoning | Content) -> Iterator[StreamEvent]:
        """Append a piece of reasoning or content to the open output item, and yield the stream events. If no fitting item is open,
        begins one first."""
        if self._text is None or self._is_reasoning != isinstance(event, Reasoning):
            yield from self._close("completed")
            yield from self._open(type(event))
        self._text.append(event.text)
        place = {"item_id": self._id, "output_index": len(self._output)}
        logprobs, self._new_logprobs = self._new_logprobs, []
        if self._is_reasoning:
            yield ReasoningTextDelta(sequence_number=self._next(), **place, delta=event.text)
        else:
            self._logprobs += logprobs
            yield OutputTextDelta(sequence_number=self._next(), **place, delta=event.text, logprobs=logprobs)

    def _open(self, kind: type[Reasoning] | type[Content]) -> Iterator[StreamEvent]:
        self._is_reasoning, self._text, self._logprobs = kind is Reasoning, [], []
        self._id = new_id("reasoning" if self._is_reasoning else "message")
        index, item = len(self._output), self._item("in_progress", [])
        yield OutputItemAdded(sequence_number=self._next(), output_index=index, item=item)
        yield ContentPartAdded(sequence_number=self._next(), item_id=self._id, output_index=index, part=self._part())

    def _close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """Yield the stream events that end the open message or reasoning item, if any."""
        if self._text is None:
            return
        place = {"item_id": self._id, "output_index": len(self._output)}
        if self._is_reasoning:
            yield ReasoningTextDone(sequence_number=self._next(), **place, text="".join(self._text))
        else:
            self._logprobs += self._new_logprobs
            self._new_logprobs = []
            text = "".join(self._text)
            yield OutputTextDone(sequence_number=self._next(), **place, text=text, logprobs=self._logprobs)
        part = self._part()
        yield ContentPartDone(sequence_number=self._next(), **place, part=part)
        item = self._item(status, [part])
        yield OutputItemDone(sequence_number=self._next(), output_index=len(self._output), item=item)
        self._output.append(item)
        self._text = None

    def _call(self, call: ToolCall) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        id, index = new_id("function_call"), len(self._output)
        status: ItemStatus = "incomplete" if call.closing else "completed"
        item = OutputCall(id=id, call_id=call.id, name=call.name, arguments=call.arguments, status=status)
        begun = msgspec.structs.replace(item, arguments="", status="in_progress")
        place = {"item_id": id, "output_index": index}
        yield OutputItemAdded(sequence_number=self._next(), output_index=index, item=begun)
        yield ArgumentsDelta(sequence_number=self._next(), **place, delta=call.arguments)
        yield ArgumentsDone(sequence_number=self._next(), **place, name=call.name, arguments=call.arguments)
        yield OutputItemDone(sequence_number=self._next(), output_index=index, item=item)
        self._output.append(item)
        self._new_logprobs = []

    def _part(self) -> OutputText | ReasoningText:
        """Content part of the output item that is open, with the text so far."""
        text = "".join(self._text)
        return ReasoningText(text) if self._is_reasoning else OutputText(text, logprobs=self._logprobs)

    def _item(self, status: ItemStatus, content: list) -> OutputItem:
        kind = OutputReasoning if self._is_reasoning else OutputMessage
        return kind(self._id, status, content)

    def _logprob(self, token: TokenLogprobs) -> ResponseLogprob:
        top = [ResponseLogprobTop(*self._logprob_entry(token_id, logprob)) for token_id, logprob in token.top.items()]
        return ResponseLogprob(*self._logprob_entry(token.token_id, token.logprob), top)

    def _logprob_entry(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        token = token_text(token_id, self._tokenizer)
        return token.token, logprob, list(token.bytes or b"")
