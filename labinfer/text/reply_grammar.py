"""Grammars for chat replies with structured output, which may follow reasoning, and for replies with forced tool calls.

The grammars use Lark's notation as llguidance reads it. Tokens that were added to the vocabulary are written by id, such as
``<[151657]>``: only the token itself matches, not its text written with other tokens, which no model was trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from labinfer.base.errors import UserError
from labinfer.text.argument_schema import ArgumentSchema, ValueTexts
from labinfer.text.reply_format import CallForm, ReplyFormat
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.tools import MAX_FORCED_CALLS, ToolUse, parameters_schema

BLANK = r"/[ \t\r\n]{0,4}/"
"""White space that is allowed after reasoning."""
_PLACES = re.compile(r"\{(name|arguments|index|key|string)\}")


class GrammarWriter:
    """Writes texts of a reply format as grammar expressions, and collects the grammar rules that the expressions refer to.

    Args:
        added_tokens: ids of the tokens added to the vocabulary, by text.
    """

    def __init__(self, added_tokens: dict[str, int]):
        self._added = added_tokens
        longest_first = sorted(filter(None, added_tokens), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.rules: list[str] = []

    def text(self, text: str) -> str:
        """Grammar expression that matches ``text``."""
        parts, end = [], 0
        for token in self._tokens.finditer(text):
            parts += [json.dumps(text[end : token.start()])] * (token.start() > end)
            parts.append(f"<[{self._added[token[0]]}]>")
            end = token.end()
        parts += [json.dumps(text[end:])] * (end < len(text))
        return " ".join(parts)

    def until(self, text: str, min_length: int = 0, max_length: int | None = None, without: Sequence[str] = ()) -> str:
        """Grammar expression that matches any text of ``min_length`` to ``max_length`` characters, followed by
        ``text``.

        Args:
            without: strings that must not occur before ``text``.
        """
        length = f"{{{min_length},{'' if max_length is None else max_length}}}"
        anything = f"/(?s:.{length})/"
        if spelled := [_escape(other) for other in without if other and not self._tokens.search(other)]:
            anything += f" & ~/(?s:.*)({'|'.join(spelled)})(?s:.*)/"
        first = self._tokens.search(text)
        head, rest = text[: first.start() if first else len(text)], text[first.start() if first else len(text) :]
        if not head:
            if spelled:  # a terminal, as only terminals can be intersected
                self.rules.append(f"ANY_{len(self.rules)}: {anything}")
                anything = f"ANY_{len(self.rules) - 1}"
            return f"{anything} {self.text(text)}"
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[suffix={json.dumps(head)}]: {anything}")
        return f"{name} {self.text(rest)}".strip()


def before_form(
    format: ReplyFormat, parser: ReplyParser, may_think: bool, added_tokens: dict[str, int], for_call: bool = False
) -> str:
    """Grammar rules for the text that may precede a structured output in a reply. The first rule is called ``before``.
    Empty if no text may precede it.

    Args:
        parser: parser that has parsed the end of the prompt.
        may_think: whether the model may begin to reason by itself.
        for_call: whether the structured output is a tool call rather than content.

    Raises:
        UserError: the prompt has opened reasoning, and the text that closes it is unknown.
    """
    writer, delimiters = GrammarWriter(added_tokens), format.reasoning
    parts = []
    if parser.is_reasoning:
        if delimiters is None:
            raise UserError(
                "the prompt opens reasoning, and the response template has no fixed text that closes it; "
                "give a --response-template FILE with 'reasoning' delimiters, or switch reasoning off with chat_template_kwargs"
            )
        parts = [writer.until(delimiters.close), BLANK]
    elif delimiters is not None and may_think and not parser.has_reasoned:
        parts = [f"({writer.text(delimiters.open)} {writer.until(delimiters.close)} {BLANK})?"]
    if format.answer and not for_call:
        parts.append(writer.text(format.answer))
    return "\n".join([f"before: {' '.join(parts)}", *writer.rules]) + "\n" if parts else ""


def forced_calls(use: ToolUse, form: CallForm, added_tokens: dict[str, int]) -> str:
    """Make a grammar of replies that consist of the tool calls that ``tool_choice`` forces.

    A tool that ``tool_choice`` names is called exactly once. With ``required``, the model makes up to ``MAX_FORCED_CALLS`` calls,
    or one if the format supports only one.
    """
    functions, several = use.forced_functions
    writer, calls = GrammarWriter(added_tokens), []
    for number, function in enumerate(functions):
        schema = parameters_schema(function)
        texts = {"name": json.dumps(function.name), "index": "/[0-9]{1,3}/"}
        texts["arguments"] = (
            f"%json {json.dumps(schema)}" if form.argument is None else _arguments(schema, form, writer)
        )
        calls.append(f"call_{number}: {_fill(form.text, texts, writer)}")
    repeated = ""
    if several and form.separator is not None:
        separator = writer.text(form.separator)
        repeated = f"({separator} call){{0,{MAX_FORCED_CALLS - 1}}}"
    start = " ".join(filter(None, [writer.text(form.begin), "call", repeated, writer.text(form.end)]))
    names = " | ".join(f"call_{number}" for number in range(len(calls)))
    return "\n".join([f"start: {start}", f"call: {names}", *calls, *writer.rules]) + "\n"


def _arguments(schema: dict[str, Any], form: CallForm, writer: GrammarWriter) -> str:
    """Grammar expression for a call's arguments, each written as text of its own, in the order of the schema. Optional arguments
    may be missing."""
    arguments, parts = ArgumentSchema(schema), []
    shared = arguments.definitions | {"x-guidance": schema["x-guidance"]}
    before, _, after = form.argument.partition("{value}")
    # Tags that must not occur in a value, as they would end the value and with it the call.
    end = form.text.partition("{arguments}")[2].strip().partition("\n")[0]
    tags = (re.match(r"[^=>{]*[=>]?", before.strip())[0], end)
    for key in arguments.properties:
        choices = []
        for is_string, value in _values(arguments.texts(key), shared, after, tags, writer):
            head = _fill(before, {"key": json.dumps(key), "string": '"true"' if is_string else '"false"'}, writer)
            choices.append(f"{head} {value}")
        parts.append(f"({' | '.join(choices)})" + "?" * (key not in arguments.required))
    return " ".join(parts)


def _values(
    texts: ValueTexts, shared: dict[str, Any], after: str, tags: Sequence[str], writer: GrammarWriter
) -> Iterator[tuple[bool, str]]:
    """Grammar expressions for the allowed values of an argument, each followed by the text ``after``. Yields (whether
    the values are strings, expression).

    Args:
        shared: keys to add to each JSON schema.
        tags: strings that must not occur in a value.
    """
    if texts.takes_any:  # a schema with several types: includes values that are no strings
        yield True, writer.until(after, texts.min_length, texts.max_length, without=tags)
        return
    strings = [writer.text(text) or '""' for text in texts.strings]
    others = [writer.text(text) for text in texts.values]
    others += [f"%json {json.dumps(schema | shared)}" for schema in texts.schemas]
    for is_string, choices in ((True, strings), (False, others)):
        if choices:
            yield is_string, f"({' | '.join(choices)}) {writer.text(after)}"


def _escape(text: str) -> str:
    """Escape ``text`` for a regular expression between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", text)


def _fill(text: str, texts: dict[str, str], writer: GrammarWriter) -> str:
    """Grammar expression that matches ``text``, whose placeholders are replaced by the expressions in ``texts``."""
    parts, end = [], 0
    for place in _PLACES.finditer(text):
        parts += [writer.text(text[end : place.start()]), texts[place[1]]]
        end = place.end()
    return " ".join(filter(None, [*parts, writer.text(text[end:])]))
