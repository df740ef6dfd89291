"""ResponseTemplate: describes how to split replies into reasoning, tool calls and content, in Transformers' format.

A template (Transformers' documentation, "Response parsing") names fields. A field has delimiters, between which its text is, and
the kind of the text. A field without an opening delimiter gets all text outside of the other fields:

    {"start_anchor": "<|im_start|>assistant\\n",
     "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true, "content": "json", …},
                "content": {}}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labinfer.text.content_parsers import check_arguments, check_transform
from labinfer.text.delimiters import Delimiter, LiteralDelimiter, Match, PatternDelimiter

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the field for reasoning; chat templates differ."""
CALLS_FIELD = "tool_calls"
TEMPLATE_KEYS = {
    "version": int,
    "defaults": dict,
    "fields": dict,
    "start_anchor": (str, list),
    "start_anchor_pattern": str,
}
FIELD_KEYS: dict[str, Any] = {
    "open": (str, list),
    "open_pattern": str,
    "close": (str, list),
    "close_pattern": str,
    "content": str,
    "content_args": dict,
    "repeats": bool,
    "join": str,
    "optional": bool,
    "transform": object,
    "transform_each": bool,
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a response template, such as the reasoning or the tool calls."""

    name: str
    open: Delimiter | None
    """Opening delimiter. None for the field that takes all text outside of the other fields."""
    close: Delimiter | None
    """Closing delimiter. None if the field extends to the end of the reply."""
    content: str
    """Kind of the field's content; see ``content_parsers.CONTENTS``."""
    arguments: dict[str, Any]
    join: str
    """Text that is put between two pieces of the field."""
    transform: Any
    """JSON value with placeholders for parts of the parsed content, which becomes the field's value. None if the parsed content is
    the value."""
    transform_each: bool
    """Whether the parsed content is a list of which each element is transformed."""

    @property
    def is_reasoning(self) -> bool:
        return self.name in REASONING_FIELDS

    @property
    def has_calls(self) -> bool:
        return self.name == CALLS_FIELD

    @property
    def strips(self) -> bool:
        """Whether white space around the field's text is dropped."""
        return bool(self.arguments.get("strip", True))


@dataclass(frozen=True)
class ResponseTemplate:
    """A parsed response template.

    ``start`` is the delimiter in the prompt that precedes the reply.
    """

    start: Delimiter
    fields: tuple[Field, ...]

    @classmethod
    def parse(cls, source: Any) -> ResponseTemplate:
        """Parse a response template from JSON.

        Raises:
            ValueError: the template is invalid; the message says which part.
        """
        _check_keys("response_template", source, TEMPLATE_KEYS)
        if source.get("version", 1) != 1:
            raise ValueError(f"response_template version {source['version']!r} is unknown; there is 1")
        start = _read_delimiter("response_template", source, "start_anchor", "start_anchor_pattern")
        if start is None:
            raise ValueError("response_template needs start_anchor or start_anchor_pattern")
        fields = tuple(_read_field(name, field) for name, field in source.get("fields", {}).items())
        if not fields:
            raise ValueError("response_template needs fields")
        left = [field.name for field in fields if field.open is None]
        if len(left) > 1:
            raise ValueError(f"fields {' and '.join(left)} both have no open; one at most may have what is left")
        return cls(start, fields)

    @property
    def leftover(self) -> Field | None:
        """The field that gets all text outside of the other fields. None if text outside of fields is dropped."""
        return next((field for field in self.fields if field.open is None), None)

    @property
    def reasoning(self) -> Field | None:
        """The field for reasoning; None if the template has none."""
        return next((field for field in self.fields if field.is_reasoning), None)

    def after_start(self, prompt: str) -> str | None:
        """The part of a prompt that already belongs to the reply: the text after the last start delimiter. None if
        there is no start delimiter."""
        begin, match = None, self.start.find(prompt, 0, len(prompt))
        while match:
            begin = match.end
            match = self.start.find(prompt, max(match.end, match.begin + 1), len(prompt))
        return None if begin is None else prompt[begin:]


def literals(delimiter: Delimiter | None) -> list[str]:
    """Literal texts that a delimiter matches; empty for a pattern or for None."""
    return delimiter.literals if isinstance(delimiter, LiteralDelimiter) else []


def is_empty(match: Match) -> bool:
    """Whether a match has length 0, for example the match of a pattern that is only a lookahead."""
    return match.begin == match.end


def _read_field(name: str, source: Any) -> Field:
    where = f"field {name!r}"
    _check_keys(where, source, FIELD_KEYS)
    if "join" in source and not source.get("repeats"):
        raise ValueError(f"{where}: join goes with repeats: true")
    if source.get("transform_each") and "transform" not in source:
        raise ValueError(f"{where}: transform_each goes with transform")
    try:
        check_arguments(source.get("content", "text"), source.get("content_args", {}))
        check_transform(source.get("transform"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Field(
        name=name,
        open=_read_delimiter(where, source, "open", "open_pattern"),
        close=_read_delimiter(where, source, "close", "close_pattern"),
        content=source.get("content", "text"),
        arguments=source.get("content_args", {}),
        join=source.get("join", "\n"),
        transform=source.get("transform"),
        transform_each=source.get("transform_each", False),
    )


def _check_keys(where: str, source: Any, kinds: dict[str, Any]) -> None:
    if not isinstance(source, dict):
        raise ValueError(f"{where} must be an object, not {source!r:.60}")
    for key, value in source.items():
        if key not in kinds:
            raise ValueError(f"{where} has the unknown key {key!r}; its keys are {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            raise ValueError(f"{where}: {key} cannot be {value!r:.60}")


def _read_delimiter(where: str, source: dict[str, Any], literal_key: str, pattern_key: str) -> Delimiter | None:
    if literal_key in source and pattern_key in source:
        raise ValueError(f"{where}: give {literal_key} or {pattern_key}, not both")
    if pattern_key in source:
        try:
            return PatternDelimiter(source[pattern_key])
        except ValueError as error:
            raise ValueError(f"{where}: {pattern_key} {error}") from None
    if literal_key not in source:
        return None
    texts = source[literal_key] if isinstance(source[literal_key], list) else [source[literal_key]]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{where}: {literal_key} must be a text or a list of texts, not {texts!r:.60}")
    return LiteralDelimiter(texts)
