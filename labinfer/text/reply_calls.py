"""Calls of tools in replies: one that is still coming in, and what its text stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labinfer.text.anchors import Match
from labinfer.text.argument_schema import ArgumentSchema
from labinfer.text.region_values import read_value, transform
from labinfer.text.reply_parts import ToolCall
from labinfer.text.response_template import Field

MAX_ID = 100
"""Characters of a call's id that a model writes; it gets another where that is longer."""
_BLANKS = re.compile(r"\s*")
_STRING_MARKS = {"outside": re.compile('"'), "in string": re.compile(r'["\\\x00-\x1f]')}


@dataclass(kw_only=True)
class OpenCall:
    """A call whose end has not come yet."""

    field: Field
    match: Match
    begin: int = 0
    """Position at which the text between the anchors begins."""
    read: int = 0
    """Position up to which that text was read."""
    first: int = 0
    """Position up to which that text is known to be blank."""
    state: str = "outside"
    """``in string``, ``escaped``, ``outside`` of strings, or ``broken``: no JSON any more, as with a line feed in a string."""

    def __post_init__(self) -> None:
        self.begin = self.read = self.first = self.match.end

    @property
    def is_json(self) -> bool:
        """Whether the text is JSON as it stands in the standard."""
        return self.field.content == "json" and not {"string_delims", "allow_non_json"} & self.field.arguments.keys()

    def move(self, cut: int) -> None:
        """The text has lost its first characters."""
        self.match = Match(self.match.begin - cut, self.match.end - cut, self.match.captures)
        self.begin, self.read, self.first = self.begin - cut, self.read - cut, self.first - cut

    def cannot_be_json(self, text: str, end: int) -> bool:
        """Whether the text up to ``end`` begins as no object and no array does."""
        self.first = _BLANKS.match(text, self.first, end).end()
        return self.first < end and text[self.first] not in "{["

    def read_to(self, text: str, end: int) -> bool:
        """Read on, up to here. Returns whether that is inside a JSON string."""
        while self.read < end and self.state != "broken":
            if self.state == "escaped":
                self.state, self.read = "in string", self.read + 1
                continue
            mark = _STRING_MARKS[self.state].search(text, self.read, end)
            if mark is None:
                break
            self.read = mark.end()
            if self.state == "outside":
                self.state = "in string"
            else:
                self.state = {'"': "outside", "\\": "escaped"}.get(mark[0], "broken")
        self.read = end
        return self.state in ("in string", "escaped")


class CallReader:
    """Makes calls of texts.

    Args:
        tools: the tools that were offered, in the form of chat templates.
        make_id: an id for a call that has none.
    """

    def __init__(self, tools: list[dict[str, Any]], make_id: Callable[[], str]):
        self._schemas = {
            tool["function"]["name"]: ArgumentSchema(tool["function"].get("parameters") or {}) for tool in tools
        }
        self._make_id = make_id

    def read(self, text: str, field: Field, captures: dict[str, str]) -> list[ToolCall]:
        """The calls in a region's text.

        Args:
            captures: named groups of the anchor that opened it.

        Raises:
            ValueError: it is no call, nor a list of calls.
        """
        value = _reshape(read_value(text, field.content, field.arguments), field, captures)
        calls = [self._read_one(item) for item in (value if isinstance(value, list) else [value])]
        if not calls:
            raise ValueError("a list of no calls")
        return calls

    def _read_one(self, value: Any) -> ToolCall:
        call = value.get("function", value) if isinstance(value, dict) else None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError("no name")
        arguments = call.get("arguments", call.get("parameters", {}))  # the latter is Llama's word for it
        if isinstance(arguments, str):
            arguments = read_value(arguments, "json", {})
        if not isinstance(arguments, dict):
            raise ValueError("arguments that are no object")
        id = value.get("id")
        return ToolCall(
            id=id if isinstance(id, str) and 0 < len(id) <= MAX_ID else self._make_id(),
            name=name,
            arguments=_spell_json(schema.cast(arguments) if (schema := self._schemas.get(name)) else arguments),
        )


def _reshape(value: Any, field: Field, captures: dict[str, str]) -> Any:
    if field.transform is None:
        return value
    if not field.transform_each:
        return transform(field.transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("no list of objects")
    return [transform(field.transform, {**captures, **item}) for item in value]


def _spell_json(arguments: dict[str, Any]) -> str:
    """Raises:
    ValueError: a number is none of JSON's.
    """
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a character, which only JSON's escapes can say
        return json.dumps(arguments, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text
