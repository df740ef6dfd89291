"""ReplyFormat: how to parse a checkpoint's replies, and the texts that constrained replies must contain.

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
"""Name of the format of plain content."""
MAX_FILE_BYTES = 1 << 18


class ReasoningDelimiters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delimiters of reasoning, as the model writes them."""

    open: str
    close: str


class CallForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text of tool calls, as the model writes it."""

    text: str
    """One call, with ``{name}``, ``{arguments}`` and, if calls are numbered, ``{index}``."""
    argument: str | None = None
    """One argument, with ``{key}`` and ``{value}``; None if the arguments are a JSON object."""
    separator: str | None = None
    """Text between two calls; None if a reply has at most one."""
    begin: str = ""
    end: str = ""


class FormatFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a file in ``response_templates/``, or of ``--response-template``."""

    response_template: dict[str, Any]
    marks: list[str] = []
    """Texts in a chat template that identify this format."""
    reasoning: ReasoningDelimiters | None = None
    answer: str = ""
    """Text before the content, after reasoning."""
    call: CallForm | None = None
    id_letters: int = 0
    """Number of letters and digits of a call id; 0 for ids in OpenAI's style."""


@dataclass(frozen=True, kw_only=True)
class ReplyFormat:
    """Format of a model's replies: its response template, with the texts that structured output needs."""

    name: str
    template: ResponseTemplate
    source: dict[str, Any]
    """The response template as JSON."""
    reasoning: ReasoningDelimiters | None
    """Delimiters of reasoning; None if the template has none as fixed texts, so that no structured output can follow reasoning."""
    answer: str
    call: CallForm | None
    """Text of tool calls; None if no call can be forced."""
    id_letters: int

    @property
    def reasoning_key(self) -> str:
        """Key of the reasoning in messages for the chat template."""
        field = self.template.reasoning
        return "reasoning_content" if field is None else field.name

    def parser(self, prompt: str, tools: list[dict[str, Any]], parallel: bool) -> ReplyParser:
        """A parser of one reply; the end of ``prompt`` is enough. See ``ReplyParser``."""
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
        """Whether the delimiters of a field contain ``token``, which must then be shown in replies."""
        return token.replace("\\", "") in self._spelled()

    def _spelled(self) -> str:
        return json.dumps(self.source.get("fields"), ensure_ascii=False).replace("\\", "")

    def _reasoning_openings(self) -> list[str]:
        field = self.template.reasoning
        return [] if field is None else literals(field.open)


def choose_format(given: str, own: Any, chat_template: str) -> ReplyFormat | None:
    """The format of a checkpoint's replies; None if they are plain content.

    Args:
        given: name of a built-in format, a JSON file, ``none``, or empty to choose automatically.
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
    """A sentence for the log on how replies are parsed.

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
    """The built-in format whose marks are all in ``chat_template``; if several, the one with the longest marks."""
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
        ValueError: ``data`` is neither a format nor a bare response template.
    """
    try:
        source = msgspec.json.decode(data)
        if isinstance(source, dict) and "fields" in source:
            source = {"response_template": source}
        return msgspec.convert(source, FormatFile)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _make(name: str, file: FormatFile, like: ReplyFormat | None) -> ReplyFormat:
    """A format from ``file``; texts that the file lacks come from the format ``like``.

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
