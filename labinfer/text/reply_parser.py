"""ReplyParser: splits a streamed reply into reasoning, tool calls and content, as the checkpoint's response template says."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from labinfer.text.delimiters import Match
from labinfer.text.reply_calls import CallReader, OpenCall
from labinfer.text.reply_parts import Content, Event, Reasoning, ReplyText, ToolCall
from labinfer.text.response_template import Field, ResponseTemplate, is_empty

WINDOW = 1024
"""Number of characters that are searched for delimiters at a time. Searching the whole rest of a reply for each field would take
quadratic time."""


class ReplyParser:
    """Parses a reply as its text streams in. The joined events do not depend on how the text is divided into pieces.

    A tool call becomes one event, when its end has arrived. A call that is not valid (its JSON is invalid, its name is missing, or
    the reply ends inside it) becomes text, delimiters included, of the field in which it began. Complete JSON is a call even if its
    closing delimiter is missing. A closing delimiter inside a JSON string is part of that string. No text raises an error.

    White space is dropped where the texts of two fields meet, unless the field has ``"strip": false``. A reply without any
    delimiter keeps all its white space. All fields but reasoning and tool calls are content.

    Args:
        prompt: the part of the prompt that already belongs to the reply (``ResponseTemplate.after_start``). It may open the
            reasoning. No events are made of it.
        tools: offered tools, in the form of chat templates. Arguments that are texts are converted to the types in
            their schemas. Without tools, calls are parsed as content.
        parallel: whether the reply may have several tool calls; if not, it ends after the first one, and later text is
            dropped.
        make_id: makes an id for a call that has none.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str = "",
        *,
        tools: list[dict[str, Any]] | None = None,
        parallel: bool = True,
        make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ):
        self._template, self._parallel, self._offers = template, parallel, bool(tools)
        self._reader = CallReader(tools or [], make_id)
        self._text = ""
        self._begin = 0  # text before this position is parsed
        self._end = 0  # end of the window of text that is searched
        self._no_calls_before = 0  # calls are searched from here on; at earlier positions none is valid
        self._passed: set[tuple[bool, str]] = set()  # delimiters that have matched an empty text at ``_begin``
        self._field = template.leftover
        self._call: OpenCall | None = None
        self._is_over = self._is_cut = False
        self._num_forgotten = -len(prompt)  # characters of the reply that were dropped from ``_text``
        self._reasoning_begin = 0  # character offset in the reply; reasoning positions are counted so, too
        self._past_reasoning: list[tuple[int, int]] = []
        self._is_closed_by_prompt = _has_closing(template, prompt)
        self._events: list[Event] = []
        self._parts = {
            Reasoning: ReplyText(kind=Reasoning, is_first=False),
            Content: ReplyText(kind=Content, is_first=True),
        }
        self.feed(prompt)
        for part in self._parts.values():
            part.forget()

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of the reply. Returns the events that the piece completes."""
        self._text += text
        return self._run(at_end=False)

    def finish(self, is_cut: bool = False) -> list[Event]:
        """End the reply. Returns the remaining events.

        Args:
            is_cut: whether the reply is truncated, for example by ``max_tokens``. If so, and if tools were offered, an open call is
                reported with the arguments that have arrived, and text that may be the beginning of a delimiter is dropped.
        """
        self._is_cut = is_cut and self._offers
        events = self._run(at_end=True)
        if last := self._parts[Content].finish():
            events.append(last)
        return events

    @property
    def is_reasoning(self) -> bool:
        """Whether the text parsed so far ends inside reasoning."""
        return self._field is not None and self._field.is_reasoning

    @property
    def reasoning_spans(self) -> list[tuple[int, int | None]]:
        """Begin and end of each reasoning text in the reply, delimiters included, in characters. The end is None if the reasoning
        is not closed yet."""
        is_open = [(self._reasoning_begin, None)] * self.is_reasoning
        return [(max(0, begin), end) for begin, end in self._past_reasoning + is_open if end is None or end > 0]

    @property
    def has_reasoned(self) -> bool:
        """Whether reasoning has been opened or closed, in the prompt or in the reply. A chat template that suppresses reasoning
        writes the closing delimiter, or both delimiters, into the prompt."""
        return self._is_closed_by_prompt or self._parts[Reasoning].is_used

    def _run(self, at_end: bool) -> list[Event]:
        while not self._is_over:
            while self._step(at_end and self._end == len(self._text)):
                pass
            if self._end == len(self._text):
                break
            self._end = min(len(self._text), self._end + WINDOW)
        self._forget_text()
        events, self._events = self._events, []
        return events

    def _step(self, at_end: bool) -> bool:
        """Parse a part of the text in the window. Returns False if more text is needed."""
        return not self._is_over and (self._read_text(at_end) if self._call is None else self._read_call(at_end))

    def _forget_text(self) -> None:
        """Drop parsed text except its last character. That character is kept so that the delimiters' regular expressions (``^``, lookbehind)
        do not take the unparsed text for the beginning of the reply."""
        if (cut := self._begin - 1) > 0:
            self._text = self._text[cut:]
            self._begin, self._end = 1, self._end - cut
            self._num_forgotten += cut
            self._no_calls_before = max(0, self._no_calls_before - cut)
            if self._call is not None:
                self._call.move(cut)

    # Text of a field: reasoning, content, or dropped text.

    def _read_text(self, at_end: bool) -> bool:
        matches, hold = [], self._end
        for is_close, field in self._watched():
            delimiter, begin = field.close if is_close else field.open, self._begin
            if (is_close, field.name) in self._passed:
                begin += 1
            if field.has_calls and not is_close:
                begin = max(begin, self._no_calls_before)
            if begin > self._end:
                continue
            if match := delimiter.find(self._text, begin, self._end):
                matches.append((match.begin, -match.end, is_close, field.name, match, field))
            if not at_end or self._is_cut:
                hold = min(hold, delimiter.pending(self._text, begin, self._end))
        best = min(matches, key=lambda candidate: candidate[:4], default=None)
        if best is None or (best[0] >= hold and not at_end):
            self._write(hold)
            if at_end:
                self._move(self._end)  # a truncated delimiter
            return False
        _, _, is_close, _, match, field = best
        self._write(match.begin)
        if is_empty(match):
            self._passed.add((is_close, field.name))
        if not is_close:
            self._open(field, match)
        elif not (is_empty(match) and field.is_reasoning):
            is_longer = (
                self._is_cut and at_end and field.close.pending(self._text, match.begin, self._end) <= match.begin
            )
            self._close(self._end if is_longer else match.end)
        elif not self._call_at(match.end, at_end):
            return False
        return True

    def _watched(self) -> list[tuple[bool, Field]]:
        """Delimiters that may come next, each as (whether it closes, its field)."""
        current = self._field
        closes = [(True, current)] if current is not None and current.close is not None else []
        if current is not self._template.leftover:
            return closes
        takes_calls = self._offers or current is None
        opens = [f for f in self._template.fields if f.open is not None and (takes_calls or not f.has_calls)]
        return [(False, field) for field in opens] + closes

    def _open(self, field: Field, match: Match) -> None:
        if field.has_calls:
            self._call = OpenCall(field=field, match=match)
            return
        self._leave(match.begin, field)
        self._move(match.end)

    def _close(self, end: int) -> None:
        self._leave(end, self._template.leftover)
        self._move(end)

    def _call_at(self, position: int, at_end: bool) -> bool:
        """Begin a call at ``position``, which ends reasoning that was not closed. If no call begins there, only the reasoning ends.

        Returns False if more text is needed to decide.
        """
        for field in self._template.fields:
            if not field.has_calls:
                continue
            match = field.open.find(self._text, position, self._end)
            if match and match.begin == position:
                if self._offers and position >= self._no_calls_before:
                    self._call = OpenCall(field=field, match=match)
                return True  # without tools, the reasoning continues
            if not at_end and field.open.pending(self._text, position, self._end) == position:
                self._passed.clear()
                return False
        self._close(position)
        return True

    def _move(self, begin: int) -> None:
        if begin > self._begin:
            self._begin = begin
            self._passed.clear()

    def _leave(self, end: int, next_field: Field | None) -> None:
        """End the current field at ``end``, and begin ``next_field``."""
        if self.is_reasoning:
            self._past_reasoning.append((self._reasoning_begin, self._num_forgotten + end))
        self._reasoning_begin = self._num_forgotten + end
        if part := self._part(self._field):
            part.close(self._field)
        self._parts[Content].is_first = False
        self._field = next_field
        if part := self._part(next_field):
            part.open(next_field)

    def _write(self, end: int) -> None:
        """Add the text up to ``end`` to the current field."""
        text = self._text[self._begin : end]
        if text and (part := self._part(self._field)):
            self._tell(part.write(text, self._field))
        self._move(end)

    def _part(self, field: Field | None) -> ReplyText | None:
        return None if field is None else self._parts[Reasoning if field.is_reasoning else Content]

    def _tell(self, event: Event | None) -> None:
        if event is not None:
            self._events.append(event)

    # Tool calls.

    def _read_call(self, at_end: bool) -> bool:
        call, hold = self._call, self._end
        close, is_json = call.field.close, call.is_json
        if is_json and call.cannot_be_json(self._text, self._end):
            return self._fail(call.match.end)
        while close is not None:
            match = close.find(self._text, call.read, self._end)
            hold = self._end if at_end else close.pending(self._text, call.read, self._end)
            if match is None or (match.begin >= hold and not at_end):
                break
            if not is_json or not call.read_to(self._text, match.begin):
                is_longer = self._is_cut and at_end and close.pending(self._text, match.begin, self._end) <= match.begin
                return self._end_call(match.begin, self._end if is_longer else match.end)
            if match.begin == self._end:
                break
            call.read_to(self._text, max(match.end, match.begin + 1))
        call.read_to(self._text, hold)
        if not at_end:
            return False
        if self._is_cut:
            return self._end_cut_call()
        return self._end_call(self._end, self._end) if is_json or close is None else self._fail(self._end)

    def _end_cut_call(self) -> bool:
        """Handle a truncated reply that ends inside a call."""
        call, end = self._call, self._end
        if call.field.close is not None and not call.is_json:
            end = call.field.close.pending(self._text, call.begin, end)
        try:
            calls = self._reader.read_cut(self._text[call.begin : end], call.field, call.match.captures)
        except ValueError:
            return self._fail(self._end)
        self._add_calls(calls, self._end)
        return True

    def _end_call(self, body_end: int, end: int) -> bool:
        call = self._call
        try:
            if not self._offers or end == call.match.begin:
                raise ValueError("no tool was offered, or there is no text at all")
            calls = self._reader.read(self._text[call.begin : body_end], call.field, call.match.captures)
        except ValueError:
            return self._fail(end)
        self._add_calls(calls, end)
        return True

    def _add_calls(self, calls: list[ToolCall], end: int) -> None:
        """Emit the calls of the current field, and continue after the field."""
        begin, self._call = self._call.match.begin, None
        self._leave(begin, self._template.leftover)
        self._move(end)
        if not self._parallel:
            calls, self._is_over = calls[:1], True
        self._events += calls

    def _fail(self, end: int) -> bool:
        """Treat the text of a call that is not valid as text of the field in which it began. Another call may begin
        inside it.

        If several calls begin inside it, only the last of them can be complete: the delimiter that ended the failed call would also
        have ended each earlier one.
        """
        call, self._call = self._call, None
        self._no_calls_before = max(call.match.end, call.match.begin + 1)
        if self._field is None:  # content, even if the template has no field for it
            self._events.append(Content(self._text[call.match.begin : end]))
            self._move(end)
            return True
        opening = call.field.open.find(self._text, self._no_calls_before, end)
        while opening:
            self._no_calls_before = opening.begin
            opening = call.field.open.find(self._text, max(opening.end, opening.begin + 1), end)
        self._passed.clear()
        self._write(call.match.end)
        self._end = min(self._end, self._begin + WINDOW)
        return True


def _has_closing(template: ResponseTemplate, prompt: str) -> bool:
    """Whether a prompt contains the delimiter that closes reasoning."""
    close = template.reasoning and template.reasoning.close
    match = close.find(prompt, 0, len(prompt)) if close else None
    return match is not None and not is_empty(match)
