"""Prompts as types: a text, token ids, or a conversation with its tools. User input is converted to one of the types as soon as it
is read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from labinfer.base.errors import UserError
from labinfer.text.messages import Ending, for_template
from labinfer.text.pair_text import PairText
from labinfer.text.tools import ToolUse

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
EXTRA_KEYS = {"cache_salt": str, "priority": int, "user": str}
TOOL_KEYS = ToolUse.__struct_fields__

VariableName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$(?!\n)")]
VariableValue = bool | int | float | Annotated[str, msgspec.Meta(max_length=1024)] | None
TemplateKwargs = Annotated[dict[VariableName, VariableValue], msgspec.Meta(max_length=16)]
"""Type of chat template variables: maps each variable's name to its value."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Chat template variables that models use to switch reasoning on and off."""


class TemplateUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a request that configure the chat template. Names and meanings are vLLM's and OpenAI's."""

    chat_template_kwargs: TemplateKwargs | None = None
    """Template variables, such as ``enable_thinking``."""
    reasoning_effort: ReasoningEffort | None = None
    """Length of the reasoning; ``none`` disables it. Mapped to the corresponding variables of the template."""
    verbosity: Verbosity | None = None
    """Length of the answer; has an effect only if the template reads the variable ``verbosity``."""
    add_generation_prompt: bool | None = None
    """False if the prompt ends after the last message, without the beginning of an answer."""
    continue_final_message: bool | None = None
    """True if the model continues the last message, as if the last message were the beginning of its answer."""

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise UserError(
                "continue_final_message continues the last message, and add_generation_prompt starts a new one; "
                "leave one out"
            )

    @property
    def ending(self) -> Ending:
        """End of the prompt that the chat template makes: inside the last message, after it, or at the beginning of an
        answer."""
        if self.continue_final_message:
            return "in message"
        return "behind message" if self.add_generation_prompt is False else "before answer"

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> TemplateUse:
        """Take the template options out of ``fields``; other fields are ignored.

        Raises:
            UserError: a field is out of bounds.
        """
        given = {name: fields[name] for name in TEMPLATE_KEYS if fields.get(name) is not None}
        try:
            return msgspec.convert(given, cls)
        except (msgspec.ValidationError, RecursionError) as error:
            raise UserError(str(error)) from None


def thinking_switches(is_on: bool) -> dict[str, bool]:
    """Template variables that switch reasoning on or off; a template ignores variables that it does not read."""
    return dict.fromkeys(THINKING_SWITCHES, is_on)


TEMPLATE_KEYS = TemplateUse.__struct_fields__


class TextPrompt(msgspec.Struct, frozen=True):
    """A text, passed to the model unchanged."""

    text: str
    limit: int = 0
    """Maximum number of tokens, special tokens included, to which the text is cut; 0 for no cut."""


class TokensPrompt(msgspec.Struct, frozen=True):
    """A prompt of token ids."""

    token_ids: list[int]


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation, which the checkpoint's chat template turns into text."""

    messages: list[dict[str, Any]]
    """Messages in the format of chat templates."""
    tool_use: ToolUse = ToolUse()
    template_use: TemplateUse = TemplateUse()
    thinking_budget: int | None = None
    """Maximum number of reasoning tokens; None for no limit. Has an effect only if a special token ends the model's
    reasoning."""


class PairPrompt(msgspec.Struct, frozen=True):
    """A query and a document, which a reranker reads together."""

    pair: PairText


Prompt = TextPrompt | TokensPrompt | ChatPrompt | PairPrompt
PromptLike = Prompt | str | list[int] | dict[str, Any] | list[dict[str, Any]]
"""A prompt in any form that Python callers may use: one of the prompt types; a text, token ids or a list of chat
messages; or a dictionary with one of the keys ``PROMPT_KEYS``.

A dictionary may also have ``cache_salt``, ``priority`` and ``user``; see ``Request``. With ``messages`` it may have the
fields of ``ToolUse``, such as ``tools``, and of ``TemplateUse``, such as ``chat_template_kwargs``.
"""


def token_limit(truncate_prompt_tokens: int | None, max_model_len: int) -> int:
    """Maximum number of tokens to which a request's ``truncate_prompt_tokens`` cuts a prompt; 0 for no cut.

    Args:
        truncate_prompt_tokens: -1 for ``max_model_len``, None for no cut.

    Raises:
        UserError: the value is not a number of tokens that the model can read.
    """
    limit = truncate_prompt_tokens
    if limit in (None, -1):
        return 0 if limit is None else max_model_len
    if type(limit) is not int or not 0 < limit <= max_model_len:
        raise UserError(f"truncate_prompt_tokens must be -1, or from 1 to {max_model_len}, not {limit!r:.40}")
    return limit


def parse_prompt(given: PromptLike) -> tuple[Prompt, dict[str, Any]]:
    """Convert a prompt to its type. Also returns the values that a dictionary has for ``EXTRA_KEYS``.

    Raises:
        UserError: the prompt has an unknown type, or a key is unknown or has a value of a wrong type.
    """
    if not isinstance(given, dict):
        return _convert(given, ToolUse(), TemplateUse()), {}
    extras, key = _extras(given), only_key(given)
    tool_use = ToolUse.from_fields(given)
    if tool_use.offered and key != "messages":
        raise UserError(f"tools need messages, not {key}")
    template_use = TemplateUse.from_fields(given)
    check_template_use(template_use, key)
    return _convert(given[key], tool_use, template_use), extras


def check_template_use(template_use: TemplateUse, key: str) -> None:
    """Check that template options are given only for a conversation.

    Raises:
        UserError: there are template options, but the prompt has the key ``key`` rather than ``messages``.
    """
    if key != "messages" and (names := list(msgspec.to_builtins(template_use))):
        raise UserError(f"{names[0]} needs messages, not {key}")


def only_key(given: dict[str, Any]) -> str:
    """Return the key in ``PROMPT_KEYS`` for which ``given`` has a value.

    Raises:
        UserError: no key has a value, or several keys have one.
    """
    keys = [key for key in PROMPT_KEYS if given.get(key) is not None]
    if len(keys) != 1:
        raise UserError(f"a prompt needs exactly one of prompt, prompt_token_ids and messages, not {sorted(given)}")
    return keys[0]


def _convert(given: Any, tool_use: ToolUse, template_use: TemplateUse) -> Prompt:
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return TextPrompt(given)
    if isinstance(given, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in given):
        return TokensPrompt(given)
    if isinstance(given, list) and all(isinstance(message, dict) for message in given):
        return ChatPrompt([for_template(message) for message in given], tool_use, template_use)
    raise UserError(f"a prompt must be a string, a list of token ids or a list of messages, not {given!r:.80}")


def _extras(given: dict[str, Any]) -> dict[str, Any]:
    known = (*PROMPT_KEYS, *EXTRA_KEYS, *TOOL_KEYS, *TEMPLATE_KEYS)
    unknown = sorted(str(key) for key in set(given).difference(known))
    if unknown:
        raise UserError(f"a prompt has no key {unknown[0]!r}; its keys are {', '.join(known)}")
    extras = {key: given[key] for key in EXTRA_KEYS if given.get(key) is not None}
    for key, value in extras.items():
        if type(value) is not EXTRA_KEYS[key]:
            raise UserError(f"{key} must be {'a string' if EXTRA_KEYS[key] is str else 'a number'}, not {value!r:.60}")
    return extras
