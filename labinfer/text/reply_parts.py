"""Parts of a parsed reply: Reasoning, Content and ToolCall; ReplyText: joins the pieces of a reply's text."""

from __future__ import annotations

from dataclasses import dataclass

from labinfer.text.response_template import Field


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning in a reply; the pieces are joined."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the content of a reply; the pieces are joined."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply."""

    id: str
    name: str
    arguments: str
    """JSON text of an object; truncated if the reply was truncated."""
    closing: str = ""
    """JSON text that would complete ``arguments``; empty if they are complete."""


Event = Reasoning | Content | ToolCall


@dataclass(frozen=True)
class Reply:
    """A complete reply: reasoning, content and tool calls."""

    reasoning: str
    content: str
    calls: list[ToolCall]


def join_events(events: list[Event]) -> Reply:
    """Join the events of a reply to the complete reply."""
    texts: dict[type, list[str]] = {Reasoning: [], Content: []}
    for event in events:
        if not isinstance(event, ToolCall):
            texts[type(event)].append(event.text)
    calls = [event for event in events if isinstance(event, ToolCall)]
    return Reply("".join(texts[Reasoning]), "".join(texts[Content]), calls)


@dataclass(kw_only=True)
class ReplyText:
    """The reasoning or the content of a reply, which may come in several pieces. White space at the end of a piece is held back
    until it is known whether to keep it."""

    kind: type[Reasoning] | type[Content]
    is_first: bool
    """Whether no delimiter precedes this text in the reply; if so, leading white space of the text is kept."""
    is_used: bool = False
    """Whether a delimiter has opened a field of this kind."""
    blank: str = ""
    has_text: bool = False
    is_fresh: bool = True
    """Whether the field that is open now has no text yet."""

    def open(self, field: Field) -> None:
        self.blank, self.is_fresh = "", True
        self.is_used = self.is_used or field.open is not None

    def close(self, field: Field) -> None:
        self.blank = "" if field.strips else self.blank

    def write(self, text: str, field: Field) -> Reasoning | Content | None:
        if field.strips:
            if self.is_fresh and not self.is_first:
                text = text.lstrip()
            settled = text.rstrip()
        else:
            settled = text
        if not settled:
            self.blank += text
            return None
        join = field.join if self.is_fresh and self.has_text else ""
        told = join + self.blank + settled
        self.blank, self.has_text, self.is_fresh = text[len(settled) :], True, False
        return self.kind(told)

    def finish(self) -> Reasoning | Content | None:
        blank, self.blank = self.blank, ""
        return self.kind(blank) if blank else None

    def forget(self) -> None:
        """Drop the text so far, which belongs to the prompt and not to the reply."""
        self.blank, self.has_text = "", False
