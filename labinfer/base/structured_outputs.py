"""StructuredOutputs: constraint on an answer by a JSON schema, regular expression, choice or grammar."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from labinfer.base.errors import UserError

MAX_GRAMMAR_LENGTH = 64 * 1024
"""Maximum length in characters of a regular expression, a grammar, a JSON schema as text, or all choices together."""
MAX_OPTIONS = 1024
"""Maximum number of strings in ``choice``."""

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Constraint on an answer: exactly one of the fields is given. Names and meanings are vLLM's.

    Raises:
        UserError: no field or several are given, or one is out of its bounds.
    """

    json: dict[str, Any] | Text | None = None
    """JSON schema (draft 2020-12) that the answer must match, as an object or as JSON text."""
    json_object: bool | None = None
    """True if the answer may be any JSON object."""
    regex: Text | None = None
    """A regular expression that must match the whole answer; without lookaround and backreferences."""
    choice: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=MAX_OPTIONS)] | None = None
    """Strings, of which the answer must be one."""
    grammar: Text | None = None
    """A context-free grammar of the answer, in Lark's notation as llguidance reads it, in GBNF, or in xgrammar's EBNF."""

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(self.__struct_fields__)
            raise UserError(f"structured_outputs needs exactly one of {names}, not {' and '.join(given) or 'none'}")
        if self.json is not None:
            self._check_json()
        elif self.choice is not None:
            self._check_choice()
        elif self.json_object is not None and self.json_object is not True:
            raise UserError(
                f"structured_outputs.json_object must be true, not {self.json_object!r:.60}; or leave it out"
            )
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                _check_text(name, text)

    @property
    def kind(self) -> str:
        """Name of the field that is given: ``json``, ``regex``, ``choice`` …"""
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    def _check_json(self) -> None:
        """Check the JSON schema in ``json``; parse it if it is text."""
        schema = self.json
        if isinstance(schema, str):
            _check_text("json", schema)
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise UserError(f"structured_outputs.json is not valid JSON: {error}") from None
        if not isinstance(schema, dict):
            raise UserError(f"structured_outputs.json must be a JSON schema, an object, not {schema!r:.60}")
        try:
            length = len(msgspec.json.encode(schema))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(f"structured_outputs.json cannot be written as JSON: {error}") from None
        _check_length("json", length)
        msgspec.structs.force_setattr(self, "json", schema)

    def _check_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, (list, tuple)) or not choice:
            raise UserError(f"structured_outputs.choice must be a list of strings, not {choice!r:.60}")
        if len(choice) > MAX_OPTIONS:
            raise UserError(f"structured_outputs.choice may have {MAX_OPTIONS} strings at most, not {len(choice)}")
        for text in choice:
            _check_text("choice", text)
        _check_length("choice", sum(map(len, choice)))
        msgspec.structs.force_setattr(self, "choice", tuple(choice))


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise UserError(f"structured_outputs.{name} must be text, not {text!r:.60}")
    _check_length(name, len(text))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"structured_outputs.{name} is not valid Unicode: {text!r:.60}") from None


def _check_length(name: str, length: int) -> None:
    if length > MAX_GRAMMAR_LENGTH:
        raise UserError(
            f"structured_outputs.{name} may have {MAX_GRAMMAR_LENGTH} characters at most, not {length}; make it shorter"
        )
