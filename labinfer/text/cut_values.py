"""CutValue: what can be parsed of a field's text in a reply that was truncated, for example by ``max_tokens``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import regex

from labinfer.text.content_parsers import Arguments, parse_content, quote_keys, tag_marks
from labinfer.text.delimiters import compile_pattern, overlap, within_time

_TOKEN = re.compile(
    r'\s*(?:(?P<string>"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*")|(?P<open>[{\[])|(?P<close>[}\]])|(?P<mark>[:,])'
    r'|(?P<atom>[^\s{}\[\],:"]+)|(?P<cut>".*))',
    re.DOTALL,
)
_OPEN_STRING = re.compile(r'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*')
_OPEN_ESCAPE = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_CLOSING = {"{": "}", "[": "]"}


class OpenText(str):
    """A string in a parsed value whose end is missing, because the text was truncated inside it."""


@dataclass(frozen=True)
class CutValue:
    """A value parsed from truncated text. A number, a literal such as ``true``, or a key is left out if the text was truncated
    inside it."""

    value: Any
    closing: str = ""
    """JSON text that closes all open strings, arrays and objects, from the inside out, such as ``"]}``; empty if the
    value is complete."""

    def part_closing(self, part: Any) -> str:
        """The first characters of ``closing``: those that close ``part``, an object or array inside the value."""
        if self.closing == "{}":
            return self.closing
        inner = self.value
        for num_closed in range(len(self.closing), 0, -1):
            if inner is part:
                return self.closing[:num_closed]
            inner = _last(inner)
        return ""


def read_cut_value(text: str, content: str, arguments: Arguments) -> CutValue:
    """Parse the truncated text of a field; see ``parse_content``.

    Raises:
        ValueError: the text cannot be the beginning of a value of kind ``content``.
    """
    if content == "xml-inline":
        return _read_tags(text, arguments)
    if content != "json":
        return CutValue(parse_content(text, content, arguments))
    for begin, end in arguments.get("string_delims", []):
        text = _quote_strings(text, begin, end)
    return read_cut_json(quote_keys(text) if arguments.get("unquoted_keys") else text)


def read_cut_json(text: str) -> CutValue:
    """Parse the object or array with which a truncated text begins; for a blank text, an empty object.

    Raises:
        ValueError: the text begins with neither an object nor an array.
    """
    if not text.strip():
        return CutValue({}, "{}")
    stack: list[str] = []
    end, readable, takes_key = 0, 0, False  # text up to ``readable``, with the ends in ``stack``, is JSON
    open_string = ""
    while not open_string and (token := _TOKEN.match(text, end)):
        end = token.end()
        kind, symbol = token.lastgroup, token[token.lastgroup]
        if kind == "open":
            stack.append(_CLOSING[symbol])
            readable, takes_key = end, symbol == "{"
        elif not stack:
            raise ValueError("neither an object nor an array")
        elif kind == "close":
            if stack.pop() != symbol:
                raise ValueError(f"{symbol} closes nothing")
            readable, takes_key = end, False
            if not stack:
                break
        elif kind == "mark":
            takes_key = symbol == "," and stack[-1] == "}"
        elif kind == "cut" and not takes_key:
            open_string = _open_string(symbol)
            readable = token.start("cut")
        elif kind == "string" or end < len(text) or symbol in ("true", "false", "null"):
            readable = readable if takes_key else end
    closing = "".join(reversed(stack))
    if not open_string:
        return CutValue(_load(text[:readable] + closing), closing)
    value = _load(f'{text[:readable]}{open_string}"{closing}')
    _mark_open(value, len(closing))
    return CutValue(value, f'"{closing}')


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _open_string(symbol: str) -> str:
    """Copy of the string literal ``symbol`` whose end is missing: without a truncated escape, and without a closing quote."""
    whole = _OPEN_STRING.match(symbol)[0]
    if not _OPEN_ESCAPE.fullmatch(symbol, len(whole)):
        raise ValueError("no JSON string")
    return re.sub(r"(?<!\\)((?:\\\\)*)\\u[dD][89abAB][0-9a-fA-F]{2}\Z", r"\1", whole)  # a high surrogate alone


def _mark_open(value: Any, depth: int) -> None:
    """Replace the last string in ``value`` by an ``OpenText``. The string is inside ``depth`` nested objects and arrays."""
    for _ in range(depth - 1):
        value = _last(value)
    if not isinstance(_last(value), str):
        raise ValueError("a key twice")
    value[next(reversed(value)) if isinstance(value, dict) else -1] = OpenText(_last(value))


def _last(value: Any) -> Any:
    if isinstance(value, dict):
        return value[next(reversed(value))] if value else None
    return value[-1] if isinstance(value, list) and value else None


def _quote_strings(text: str, begin: str, end: str) -> str:
    """Copy of ``text`` in which strings with the delimiters ``begin`` and ``end`` are JSON strings. A truncated string gets no
    closing quote."""
    parts, position = [], 0
    while (opening := text.find(begin, position)) >= 0:
        parts.append(text[position:opening])
        closing = text.find(end, opening + len(begin))
        if closing < 0:
            rest = text[opening + len(begin) :]
            parts.append(json.dumps(rest[: len(rest) - overlap(rest, end)])[:-1])
            return "".join(parts)
        parts.append(json.dumps(text[opening + len(begin) : closing]))
        position = closing + len(end)
    rest = text[position:]
    return "".join([*parts, rest[: len(rest) - overlap(rest, begin)]])


def _read_tags(text: str, arguments: Arguments) -> CutValue:
    """Parse a text of tags. If the last tag is truncated, its value is kept if it is a string."""
    pattern = arguments["tag_pattern"]
    beginning, ending = tag_marks(pattern)
    end = text.rfind(ending) + len(ending) if ending and ending in text else 0
    values, rest = parse_content(text[:end], "xml-inline", arguments), text[end:].lstrip()
    tag = _open_tag(pattern, rest)
    if tag is None:
        if not (beginning.startswith(rest) or (beginning and rest.startswith(beginning))):
            raise ValueError(f"{rest!r:.60} is no tag")
        return CutValue(values, "}")
    value, key = rest[tag.end() :], tag["key"]
    if beginning and beginning in value:
        raise ValueError(f"a tag begins in the value of {key!r:.60}")
    if key in values or "value_parser" in arguments or tag.groupdict().get("string") == "false":
        return CutValue(values, "}")
    value = value[: len(value) - overlap(value, ending)].removesuffix("\n")
    return CutValue({**values, key: OpenText(value)}, '"}')


def _open_tag(pattern: str, text: str) -> regex.Match[str] | None:
    """Match of a tag's opening part, before its value, at the beginning of ``text``. None if ``text`` does not begin with a
    complete opening part."""
    try:
        opening = compile_pattern(pattern.partition("(?P<value>")[0])
        return within_time(lambda seconds: opening.match(text, timeout=seconds))
    except (ValueError, TimeoutError):  # the value is in another group, or the search takes too long
        return None
