"""parse_content: parses the text of one field of a reply, by the kind of content that the response template gives the field.

The kinds of content, and their arguments, are those of Transformers' response templates (Transformers' documentation,
"Response parsing"). Any text gives either a value or a ``ValueError``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from labinfer.text.delimiters import MATCH_SECONDS, compile_pattern, within_time

Arguments = dict[str, Any]


def parse_content(text: str, content: str, arguments: Arguments) -> Any:
    """Parse the text of a field in a reply.

    Args:
        content: kind of the text, a key of ``CONTENTS`` such as ``json``.
        arguments: options of the kind: ``content_args`` of the field in the response template.

    Raises:
        ValueError: the text is not of kind ``content``.
    """
    try:
        return CONTENTS[content][0](text, arguments)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_arguments(content: Any, arguments: Any) -> None:
    """Check the values that a response template gives for the content of a field: its kind, and the arguments of the kind.

    Raises:
        ValueError: ``content`` is not a kind of content, or does not take ``arguments``.
    """
    if not isinstance(content, str) or content not in CONTENTS:
        raise ValueError(f"content {content!r:.60} is unknown; there are {', '.join(CONTENTS)}")
    kinds = CONTENTS[content][1]
    if not isinstance(arguments, dict):
        raise ValueError(f"content_args must be an object, not {arguments!r:.60}")
    for name, value in arguments.items():
        if name not in kinds or not isinstance(value, kinds[name]):
            known = ", ".join(kinds) or "none"
            raise ValueError(f"content_args {name}={value!r:.60} does not go with {content!r}, which takes {known}")
    if content == "xml-inline":
        pattern = arguments.get("tag_pattern", "")
        if "key" not in compile_pattern(pattern).groupindex:
            raise ValueError(f"tag_pattern {pattern!r:.200} needs groups (?P<key>…) and (?P<value>…)")
    for delimiters in arguments.get("string_delims", []):
        if not isinstance(delimiters, list) or len(delimiters) != 2 or not all(map(_is_text, delimiters)):
            raise ValueError(f"string_delims must be pairs of texts, not {delimiters!r:.60}")
    for name in ("line_sep", "kv_sep"):
        if arguments.get(name) == "":
            raise ValueError(f"content_args {name} must not be empty")
    if (inner := arguments.get("value_parser")) is not None:
        check_arguments(inner.get("name", "text"), inner.get("args", {}))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# Parsers of the kinds of content.


def _text(text: str, arguments: Arguments) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _number(kind: Callable[[str], Any]) -> Callable[[str, Arguments], Any]:
    def read(text: str, arguments: Arguments) -> Any:
        try:
            return kind(text)
        except OverflowError as error:
            raise ValueError(str(error)) from None

    return read


def _bool(text: str, arguments: Arguments) -> bool:
    return text.strip().lower() in ("true", "1")


def _json(text: str, arguments: Arguments) -> Any:
    """Parse JSON. With ``string_delims``, strings may have other delimiters; with ``unquoted_keys``, keys may lack
    quotes."""
    source = text
    for begin, end in arguments.get("string_delims", []):
        string = re.compile(re.escape(begin) + "(.*?)" + re.escape(end), re.DOTALL)
        last = source.rfind(end) + len(end) if end in source else 0  # the delimiter is missing: no string ends after it
        source = string.sub(lambda match: json.dumps(match[1]), source[:last]) + source[last:]
    if arguments.get("unquoted_keys"):
        source = quote_keys(source)
    try:
        return json.loads(source)
    except ValueError:
        if arguments.get("allow_non_json"):
            return text.strip()
        raise


def quote_keys(text: str) -> str:
    """Put quotes around the keys of JSON text that have none."""
    return _OUTSIDE_STRINGS.sub(lambda match: match[1] or f'{match[2]}"{match[3]}":', text)


_OUTSIDE_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*"?)|([{,]\s*)(\w+)\s*:', re.DOTALL)


def _tags(text: str, arguments: Arguments) -> dict[str, Any]:
    """Parse a text that consists of tags such as ``<parameter=city>Paris</parameter>``. Text between tags, or a tag that begins
    inside a value, is an error, as it means that a tag was not closed. The value of a tag with ``string="false"`` is JSON."""
    pattern, values, last = arguments["tag_pattern"], {}, 0
    beginning, ending = tag_marks(pattern)
    end = text.rfind(ending) + len(ending) if ending in text else 0
    tag = compile_pattern(pattern)
    try:
        matches = within_time(lambda seconds: list(tag.finditer(text, 0, end, timeout=seconds)))
    except TimeoutError:
        raise ValueError(f"{pattern!r:.200} takes more than {MATCH_SECONDS:g} s") from None
    for match in matches:
        groups = match.groupdict()
        key, value = groups["key"], groups.get("value") or ""
        _check_between(text[last : match.start()])
        if beginning and beginning in value:
            raise ValueError(f"a tag begins in the value of {key!r:.60}")
        last, value = match.end(), _inner(value, arguments)
        if groups.get("string") == "false" and isinstance(value, str):
            value = _json(value, {"allow_non_json": True})
        if key in values and arguments.get("merge_duplicates"):
            earlier = values[key]
            values[key] = [*earlier, value] if isinstance(earlier, list) else [earlier, value]
        else:
            values[key] = value
    _check_between(text[last:])
    return values


def tag_marks(pattern: str) -> tuple[str, str]:
    """Literal texts with which every match of a tag's pattern begins and ends. A text that varies is returned as an empty
    string."""
    elements = list(_ELEMENT.finditer(pattern))
    if any(element["or"] for element in elements):
        return "", ""
    letters = [(element["letter"] or "")[-1:] for element in elements]
    for index, element in enumerate(elements):
        if element["repeat"]:
            letters[index - 1] = ""
    beginning, ending = takewhile(bool, letters), takewhile(bool, reversed(letters))
    return "".join(beginning), "".join(ending)[::-1]


_ELEMENT = re.compile(
    r"(?P<letter>\\\W|[^\\\[\](){}.^$*+?|])|(?P<or>\|)|(?P<repeat>[*+?{])"
    r"|\\(?:x..|u.{4}|U.{8}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|.",
    re.DOTALL,
)


def _check_between(text: str) -> None:
    if _WORD.search(text):
        raise ValueError(f"{text.strip()!r:.60} is no tag")


_WORD = re.compile(r"\w")


def _lines(text: str, arguments: Arguments) -> dict[str, Any]:
    """Parse lines that have a key and a value each."""
    values, separator = {}, arguments.get("kv_sep", ":")
    for line in text.split(arguments.get("line_sep", "\n")):
        key, separated, value = _text(line, arguments).partition(separator)
        if separated:
            values[_text(key, arguments)] = _inner(_text(value, arguments), arguments)
    return values


def _inner(text: str, arguments: Arguments) -> Any:
    reader = arguments.get("value_parser")
    return text if reader is None else parse_content(text, reader.get("name", "text"), reader.get("args", {}))


_LAX = {"unquoted_keys": bool, "string_delims": list, "allow_non_json": bool}
_TAGS = {"tag_pattern": str, "value_parser": dict, "merge_duplicates": bool}
_LINES = {"line_sep": str, "kv_sep": str, "value_parser": dict, "strip": bool}
CONTENTS: dict[str, tuple[Callable[[str, Arguments], Any], dict[str, type]]] = {
    "text": (_text, {"strip": bool}),
    "int": (_number(int), {"strip": bool}),
    "float": (_number(float), {"strip": bool}),
    "bool": (_bool, {"strip": bool}),
    "json": (_json, _LAX),
    "xml-inline": (_tags, _TAGS),
    "kv-lines": (_lines, _LINES),
}
"""Parser of each kind of content, and the types of its arguments."""


# ``transform`` of a field: the form in which its parsed value is returned.

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


def check_transform(form: Any) -> None:
    """Check ``form``, the JSON value ``transform`` of a field in a response template, whose placeholders ``transform()`` replaces.

    Raises:
        ValueError: a string in ``form`` has a placeholder, such as ``{content.name}``, and other text.
    """
    for inner in form.values() if isinstance(form, dict) else form if isinstance(form, list) else ():
        check_transform(inner)
    if isinstance(form, str) and _PLACEHOLDER.search(form) and not _PLACEHOLDER.fullmatch(form):
        raise ValueError(f"transform {form!r:.100} mixes a placeholder with other text; make it one of the two")


def transform(form: Any, values: dict[str, Any]) -> Any:
    """Copy of the JSON value ``form`` in which placeholders, such as ``"{content.name}"``, are replaced by ``values``.

    Raises:
        ValueError: a placeholder has no value.
    """
    if isinstance(form, dict):
        return {key: transform(inner, values) for key, inner in form.items()}
    if isinstance(form, list):
        return [transform(inner, values) for inner in form]
    if not isinstance(form, str) or not (placeholder := _PLACEHOLDER.fullmatch(form)):
        return form
    value: Any = values
    for key in placeholder[1].split("."):
        if not isinstance(value, dict) or key not in value:
            raise ValueError(f"there is no {placeholder[1]}")
        value = value[key]
    return value
