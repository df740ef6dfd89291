"""Tool calls in replies. OpenCall: a tool call whose end has not arrived yet; CallReader: parses the text of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labinfer.text.argument_schema import ArgumentSchema
from labinfer.text.content_parsers import parse_content, transform
from labinfer.text.cut_values import CutValue, OpenText, read_cut_json, read_cut_value
from labinfer.text.delimiters import Match
from labinfer.text.reply_parts import ToolCall
from labinfer.text.response_template import Field

MAX_ID = 100
"""Maximum length, in characters, of the id that a model writes for a call; a longer id is replaced."""
_BLANKS = re.compile(r"\s*")
_STRING_MARKS = {"outside": re.compile('"'), "in string": re.compile(r'["\\\x00-\x1f]')}


@dataclass(kw_only=True)
class OpenCall:
    """A tool call of a streamed reply whose end has not arrived yet. Positions are indices into the reply's text."""

    field: Field
    match: Match
    begin: int = 0
    """Position after the call's opening delimiter."""
    read: int = 0
    """Position up to which the call's text has been scanned."""
    first: int = 0
    """Position up to which the call's text is known to be white space."""
    state: str = "outside"
    """State of the JSON scanner: ``outside`` (of strings), ``in string``, ``escaped``, or ``broken`` (not valid JSON,
    for example a line feed inside a string)."""

    def __post_init__(self) -> None:
        self.begin = self.read = self.first = self.match.end

    @property
    def is_json(self) -> bool:
        """Whether the reply format writes calls as standard JSON."""
        return self.field.content == "json" and not {"string_delims", "allow_non_json"} & self.field.arguments.keys()

    def move(self, cut: int) -> None:
        """Reduce all positions by ``cut``, as the first ``cut`` characters of the reply's text have been dropped."""
        self.match = Match(self.match.begin - cut, self.match.end - cut, self.match.captures)
        self.begin, self.read, self.first = self.begin - cut, self.read - cut, self.first - cut

    def cannot_be_json(self, text: str, end: int) -> bool:
        """Whether the call's text up to ``end`` cannot be the beginning of a JSON object or array."""
        self.first = _BLANKS.match(text, self.first, end).end()
        return self.first < end and text[self.first] not in "{["

    def read_to(self, text: str, end: int) -> bool:
        """Scan the call's text up to ``end``. Returns whether that position is inside a JSON string."""
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
    """Parses the text of tool calls.

    Args:
        tools: offered tools, in the form of chat templates.
        make_id: makes an id for a call that has none.
    """

    def __init__(self, tools: list[dict[str, Any]], make_id: Callable[[], str]):
        self._schemas = {
            tool["function"]["name"]: ArgumentSchema(tool["function"].get("parameters") or {}) for tool in tools
        }
        self._make_id = make_id

    def read(self, text: str, field: Field, captures: dict[str, str]) -> list[ToolCall]:
        """Parse the complete text of one call or of several calls.

        Args:
            captures: texts that the named groups of the opening delimiter matched.

        Raises:
            ValueError: the text is neither a tool call nor a list of tool calls.
        """
        value = _reshape(parse_content(text, field.content, field.arguments), field, captures)
        calls = [self._read_one(item) for item in (value if isinstance(value, list) else [value])]
        if not calls:
            raise ValueError("a list of no calls")
        return calls

    def read_cut(self, text: str, field: Field, captures: dict[str, str]) -> list[ToolCall]:
        """Parse the truncated text of calls. The last call gets the arguments that have arrived. A last call whose name is
        incomplete is left out.

        Raises:
            ValueError: the text cannot be the beginning of a tool call or of a list of tool calls.
        """
        if not text.strip() and "name" not in captures:
            return []
        cut = read_cut_value(text, field.content, field.arguments)
        value = _reshape(cut.value, field, captures, is_cut=True)
        items = value if isinstance(value, list) else [value]
        return [*map(self._read_one, items[:-1]), *(call for item in items[-1:] for call in self._read_last(item, cut))]

    def _read_last(self, value: Any, cut: CutValue) -> list[ToolCall]:
        call = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(call, dict):
            raise ValueError("no call")
        name, arguments = call.get("name"), call.get("arguments")
        arguments = call.get("parameters") if arguments is None else arguments
        if not isinstance(name, str) or not name or isinstance(name, OpenText):
            return []
        if arguments is None:
            cut = CutValue({}, "{}" if cut.closing else "")
            arguments = cut.value
        elif isinstance(arguments, str):
            cut = read_cut_json(arguments)
            arguments = cut.value
        if not isinstance(arguments, dict):
            raise ValueError("arguments that are no object")
        closing, schema = cut.part_closing(arguments), self._schemas.get(name)
        key = next(reversed(arguments), "")
        if schema and isinstance(arguments.get(key), OpenText) and not schema.takes_string(key):
            arguments, closing = {other: arguments[other] for other in arguments if other != key}, "}"
        text = self._call_text(name, arguments)
        if closing and not text.endswith(closing):  # the schema casts the truncated string to another type
            text, closing = self._call_text(name, dict(list(arguments.items())[:-1])), "}"
        return [ToolCall(id=self._id(value), name=name, arguments=text[: len(text) - len(closing)], closing=closing)]

    def _call_text(self, name: str, arguments: dict[str, Any]) -> str:
        return _spell_json(schema.cast(arguments) if (schema := self._schemas.get(name)) else arguments)

    def _id(self, value: dict[str, Any]) -> str:
        id = value.get("id")
        return id if type(id) is str and 0 < len(id) <= MAX_ID else self._make_id()

    def _read_one(self, value: Any) -> ToolCall:
        call = value.get("function", value) if isinstance(value, dict) else None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError("no name")
        arguments = call.get("arguments", call.get("parameters", {}))  # Llama writes ``parameters``
        if isinstance(arguments, str):
            arguments = parse_content(arguments, "json", {})
        if not isinstance(arguments, dict):
            raise ValueError("arguments that are no object")
        return ToolCall(id=self._id(value), name=name, arguments=self._call_text(name, arguments))


def _reshape(value: Any, field: Field, captures: dict[str, str], is_cut: bool = False) -> Any:
    if field.transform is None:
        return value
    if not field.transform_each:
        return transform(field.transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("no list of objects")
    missing = dict.fromkeys(("name", "arguments", "parameters") if is_cut else ())
    return [transform(field.transform, {**captures, **missing, **item}) for item in value]


def _spell_json(arguments: dict[str, Any]) -> str:
    """Write the arguments of a call as JSON.

    Raises:
        ValueError: a number is not valid in JSON, or ``arguments`` are nested too deeply.
    """
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only write as an escape
        return json.dumps(arguments, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text
