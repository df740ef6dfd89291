"""ReplyFormat: how the replies of a checkpoint are parsed, and the texts that grammars for its replies contain.

A format is a JSON file in ``response_templates/``, or a user's file; see ``docs/response-templates.md``.
"""

from __future__ import annotations

import json
import logging
import secrets
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from labinfer.base.errors import UserError
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.response_template import ResponseTemplate, literals

logger = logging.getLogger(__name__)

BUILT_IN = Path(__file__).with_name("response_templates")
NONE = "none"
"""Name of the format in which all text is content, without reasoning and tool calls."""
MAX_FILE_BYTES = 1 << 18


class ReasoningDelimiters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts that a model writes before and after its reasoning."""

    open: str
    close: str


class CallForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a model writes tool calls, as texts with placeholders. Grammars that force calls are made from them."""

    text: str
    """Text of one call, with the placeholders ``{name}``, ``{arguments}`` and, if calls are numbered, ``{index}``."""
    argument: str | None = None
    """Text of one argument, with the placeholders ``{key}`` and ``{value}``; None if all arguments together are a JSON
    object."""
    separator: str | None = None
    """Text between two calls; None if a reply can have only one."""
    begin: str = ""
    end: str = ""


class FormatFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a file in ``response_templates/``, or of ``--response-template``."""

    response_template: dict[str, Any]
    marks: list[str] = []
    """Texts by which the format is chosen: it fits a model whose chat template contains all of them."""
    reasoning: ReasoningDelimiters | None = None
    answer: str = ""
    """Text that the model writes before its content, after any reasoning."""
    call: CallForm | None = None
    id_letters: int = 0
    """Number of letters and digits in the id that a call gets; 0 for ids such as OpenAI's."""


@dataclass(frozen=True, kw_only=True)
class ReplyFormat:
    """Format of a model's replies: the response template that parses them, and texts for grammars that constrain them."""

    name: str
    template: ResponseTemplate
    source: dict[str, Any]
    """The response template as JSON."""
    reasoning: ReasoningDelimiters | None
    """Delimiters of the reasoning. None if the template has no fixed texts for them; structured output then cannot
    follow reasoning."""
    answer: str
    call: CallForm | None
    """How the model writes tool calls; None if the format cannot force calls."""
    id_letters: int

    @property
    def reasoning_key(self) -> str:
        """Key under which the chat template expects the reasoning in messages."""
        field = self.template.reasoning
        return "reasoning_content" if field is None else field.name

    def parser(self, prompt: str, tools: list[dict[str, Any]], parallel: bool) -> ReplyParser:
        """Make a parser for one reply to ``prompt``, of which only the end is needed. For the arguments see ``ReplyParser``."""
        prompt_part = self.template.after_start(prompt)
        if prompt_part is None:
            prompt_part = next((text for text in self._reasoning_openings() if prompt.rstrip().endswith(text)), "")
        letters = self.id_letters
        if not letters:
            return ReplyParser(self.template, prompt_part, tools=tools, parallel=parallel)
        return ReplyParser(
            self.template, prompt_part, tools=tools, parallel=parallel, make_id=lambda: _random_letters(letters)
        )

    def mentions(self, token: str) -> bool:
        """Whether ``token`` is part of a delimiter of this format. If so, the text of replies must include ``token``."""
        return token.replace("\\", "") in self._spelled()

    def _spelled(self) -> str:
        return json.dumps(self.source.get("fields"), ensure_ascii=False).replace("\\", "")

    def _reasoning_openings(self) -> list[str]:
        field = self.template.reasoning
        return [] if field is None else literals(field.open)


def choose_format(given: str, own: Any, chat_template: str) -> ReplyFormat | None:
    """Choose the format of a checkpoint's replies. None if replies have neither reasoning nor tool calls.

    Args:
        given: value of ``--response-template``: name of a built-in format, a JSON file, or ``none``; empty to choose
            automatically.
        own: the checkpoint's ``response_template``; None if it has none.
        chat_template: source of the checkpoint's chat template, which is searched for the marks of built-in formats.

    Raises:
        UserError: ``given`` names no format, or an invalid one.
    """
    if given == NONE:
        return None
    marked = _by_marks(chat_template)
    if given:
        return _given(given, chat_template)
    if own is not None:
        try:
            return _make("the checkpoint's own", FormatFile(response_template=own), marked)
        except ValueError as error:
            logger.warning("the checkpoint's response_template cannot be used: %s", error)
    return marked


def describe_choice(chosen: ReplyFormat | None, given: str) -> str:
    """Line for the log that says how replies are parsed.

    Args:
        chosen: result of ``choose_format``.
        given: argument of ``choose_format``.
    """
    if chosen is not None:
        return f"chat replies are parsed with the response template {chosen.name}"
    if given == NONE:
        return f"chat replies are returned as content only (--response-template {NONE})"
    return (
        "chat replies are returned as content only: the checkpoint has no response_template, and no built-in one "
        "matches its chat template; give one with --response-template NAME|FILE"
    )


def built_in_names() -> list[str]:
    """Names of the formats shipped with LABInfer."""
    return sorted(path.stem for path in BUILT_IN.glob("*.json"))


def load_built_in(name: str) -> ReplyFormat:
    """The built-in format ``name``."""
    return _make(name, _decode((BUILT_IN / f"{name}.json").read_bytes()), None)


def _by_marks(chat_template: str) -> ReplyFormat | None:
    """The built-in format whose marks all occur in ``chat_template``. If several formats match, the one with the longest marks."""
    lengths = {}
    for name in built_in_names():
        marks = _decode((BUILT_IN / f"{name}.json").read_bytes()).marks
        if marks and all(mark in chat_template for mark in marks):
            lengths[name] = sum(map(len, marks))
    return load_built_in(max(lengths, key=lengths.__getitem__)) if lengths else None


def _given(given: str, chat_template: str) -> ReplyFormat:
    if given in built_in_names():
        return load_built_in(given)
    path = Path(given)
    if not path.is_file():
        names = ", ".join([*built_in_names(), NONE])
        raise UserError(f"--response-template {given} is neither a file nor a built-in template: {names}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return _make(given, _decode(path.read_bytes()), _by_marks(chat_template))
    except (ValueError, OSError) as error:
        raise UserError(f"--response-template {given} cannot be used: {error}") from None


def _decode(data: bytes) -> FormatFile:
    """Decode a reply format from JSON.

    Raises:
        ValueError: ``data`` is neither a reply format nor a response template alone.
    """
    try:
        source = msgspec.json.decode(data)
        if isinstance(source, dict) and "fields" in source:
            source = {"response_template": source}
        return msgspec.convert(source, FormatFile)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _make(name: str, file: FormatFile, like: ReplyFormat | None) -> ReplyFormat:
    """Make a reply format from ``file``. Texts that ``file`` lacks are taken from the format ``like``.

    Raises:
        ValueError: the template is invalid.
    """
    template = ResponseTemplate.parse(file.response_template)
    reasoning = file.reasoning or (like and like.reasoning) or _plain_delimiters(template)
    return ReplyFormat(
        name=name,
        template=template,
        source=file.response_template,
        reasoning=reasoning,
        answer=file.answer or (like.answer if like else ""),
        call=file.call or (like.call if like else None),
        id_letters=file.id_letters or (like.id_letters if like else 0),
    )


def _plain_delimiters(template: ResponseTemplate) -> ReasoningDelimiters | None:
    field = template.reasoning
    if field is None or not literals(field.open) or not literals(field.close):
        return None
    return ReasoningDelimiters(literals(field.open)[0], literals(field.close)[0])


def _random_letters(count: int) -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(count))
