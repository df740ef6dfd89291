"""Events of a streamed response (OpenAI's API reference, "Streaming events"), in the order in which a reply makes them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from labinfer.base.plan import TokenLogprobs
from labinfer.requests.openai.api_object import ApiObject, Count, FinishReason, Usage, spell
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
    """An event, with its place in the stream."""

    sequence_number: Count


class ResponseEvent(StreamEvent):
    """The response as a whole."""

    response: Response


class ResponseCreated(ResponseEvent, tag="response.created"):
    """The first event."""


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    """The second."""


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    """The last event of a whole response."""


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    """The last event of one that was cut off."""


class ResponseFailed(ResponseEvent, tag="response.failed"):
    """The last event of one that failed."""


class ItemEvent(StreamEvent, kw_only=True):
    """An item of the output."""

    output_index: Count
    item: OutputItem


class OutputItemAdded(ItemEvent, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(ItemEvent, tag="response.output_item.done"):
    """An item is whole."""


class InItemEvent(StreamEvent, kw_only=True):
    """A change inside an item."""

    item_id: str
    output_index: Count


class PartEvent(InItemEvent, kw_only=True):
    """A part of an item's content."""

    content_index: Count = 0
    part: OutputText | ReasoningText


class ContentPartAdded(PartEvent, tag="response.content_part.added"):
    """A part begins."""


class ContentPartDone(PartEvent, tag="response.content_part.done"):
    """A part is whole."""


class OutputTextDelta(InItemEvent, tag="response.output_text.delta", kw_only=True):
    """A piece of a message."""

    content_index: Count = 0
    delta: str
    logprobs: list[ResponseLogprob]


class OutputTextDone(InItemEvent, tag="response.output_text.done", kw_only=True):
    """The whole text of a message."""

    content_index: Count = 0
    text: str
    logprobs: list[ResponseLogprob]


class ReasoningTextDelta(InItemEvent, tag="response.reasoning_text.delta", kw_only=True):
    """A piece of a thought."""

    content_index: Count = 0
    delta: str


class ReasoningTextDone(InItemEvent, tag="response.reasoning_text.done", kw_only=True):
    """The whole text of a thought."""

    content_index: Count = 0
    text: str


class ArgumentsDelta(InItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """The arguments of a call, which come as a whole."""

    delta: str


class ArgumentsDone(InItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    """The whole arguments of a call."""

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
    """Makes the output of a response of a reply's events, and the stream's events on the way. Whoever wants the response
    alone passes them over.
    """

    def __init__(self, response: Response, tokenizer: Tokenizer | None):
        self.response, self._tokenizer = response, tokenizer
        """The response as far as it has come."""
        self._number = -1  # of the last event
        self._output: list[OutputItem] = []
        self._text: list[str] | None = None  # of the message or thought that is open
        self._is_thought = False
        self._id = ""
        self._logprobs: list[ResponseLogprob] = []
        """Log-probabilities of the message that is open."""
        self._new_logprobs: list[ResponseLogprob] = []

    def begin(self) -> Iterator[StreamEvent]:
        """The events before the first token."""
        yield ResponseCreated(sequence_number=self._next(), response=self.response)
        yield ResponseInProgress(sequence_number=self._next(), response=self.response)

    def add(self, events: list[Event], measured: list[TokenLogprobs] | None) -> Iterator[StreamEvent]:
        """Take in what a reply has come to, and the log-probabilities of its tokens where they are asked for."""
        self._new_logprobs += [self._logprob(token) for token in measured or ()]
        for event in events:
            if isinstance(event, ToolCall):
                yield from self._call(event)
            else:
                yield from self._write(event)

    def end(self, finish_reason: FinishReason, usage: Usage, now: int) -> Iterator[StreamEvent]:
        """The events after the last token, which came at ``now``, in seconds since 1970."""
        is_cut = finish_reason == "length"
        status: ItemStatus = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        if not is_cut and all(isinstance(item, OutputReasoning) for item in self._output):
            yield from self._open(Content)  # whoever waits for a message is to get one
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
        """The last event where the rest will not come."""
        failure = ResponseFailure("server_error", message)
        self.response = msgspec.structs.replace(
            self.response, status="failed", error=failure, output=list(self._output)
        )
        return ResponseFailed(sequence_number=self._next(), response=self.response)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _write(self, event: Reasoning | Content) -> Iterator[StreamEvent]:
        """A piece of a thought or of a message."""
        if self._text is None or self._is_thought != isinstance(event, Reasoning):
            yield from self._close("completed")
            yield from self._open(type(event))
        self._text.append(event.text)
        place = {"item_id": self._id, "output_index": len(self._output)}
        logprobs, self._new_logprobs = self._new_logprobs, []
        if self._is_thought:
            yield ReasoningTextDelta(sequence_number=self._next(), **place, delta=event.text)
        else:
            self._logprobs += logprobs
            yield OutputTextDelta(sequence_number=self._next(), **place, delta=event.text, logprobs=logprobs)

    def _open(self, kind: type[Reasoning] | type[Content]) -> Iterator[StreamEvent]:
        self._is_thought, self._text, self._logprobs = kind is Reasoning, [], []
        self._id = new_id("reasoning" if self._is_thought else "message")
        index, item = len(self._output), self._item("in_progress", [])
        yield OutputItemAdded(sequence_number=self._next(), output_index=index, item=item)
        yield ContentPartAdded(sequence_number=self._next(), item_id=self._id, output_index=index, part=self._part())

    def _close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """End the message or thought that is open, if one is."""
        if self._text is None:
            return
        place = {"item_id": self._id, "output_index": len(self._output)}
        if self._is_thought:
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
        """The content that is open, as far as it has come."""
        text = "".join(self._text)
        return ReasoningText(text) if self._is_thought else OutputText(text, logprobs=self._logprobs)

    def _item(self, status: ItemStatus, content: list) -> OutputItem:
        kind = OutputReasoning if self._is_thought else OutputMessage
        return kind(self._id, status, content)

    def _logprob(self, token: TokenLogprobs) -> ResponseLogprob:
        top = [ResponseLogprobTop(*self._spell(token_id, logprob)) for token_id, logprob in token.top.items()]
        return ResponseLogprob(*self._spell(token.token_id, token.logprob), top)

    def _spell(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        spelling = spell(token_id, self._tokenizer)
        return spelling.token, logprob, list(spelling.bytes or b"")
