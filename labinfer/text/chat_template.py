"""ChatTemplate: a checkpoint's chat template. Rendered in a sandbox, as a template is a program that comes with the weights."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from labinfer.base.errors import UserError
from labinfer.text.limited_rendering import LimitedEnvironment, limited, within_limits
from labinfer.text.messages import Ending

CONTINUATION_MARK = "<goes on here>"
"""Text appended to a message that the model is to continue. The rendered conversation is cut off where this text begins."""
MAX_TEMPLATE = 1 << 20
"""Maximum length of a template, in characters."""

RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")
)
"""Names of the variables that every template receives."""


class ChatTemplate:
    """A Jinja template that turns a conversation into text, in the environment that Hugging Face's templates expect.

    Args:
        source: text of the template.
        special_tokens: ``bos_token`` and the like, by name.

    Raises:
        UserError: the template does not parse.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        if len(source) > MAX_TEMPLATE:
            raise UserError(f"the chat template has {len(source)} characters; {MAX_TEMPLATE} are supported")
        environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        environment.filters["tojson"] = limited(_to_json)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            parsed = environment.parse(source)
            self._template = within_limits(lambda: environment.from_string(parsed))
        except Exception as error:  # noqa: BLE001 - errors of Jinja, and of Python, which compiles Jinja's output
            raise UserError(f"the chat template does not parse: {str(error) or type(error).__name__:.300}") from None
        self._special_tokens = special_tokens
        self._takes_tools = any(name.name == "tools" for name in parsed.find_all(nodes.Name))
        self.source = source
        """Text of the template."""
        self.variables = meta.find_undeclared_variables(parsed).difference(RESERVED, environment.globals)
        """Names of the variables that the template reads, other than ``RESERVED`` and Jinja's globals."""

    def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        variables: dict[str, Any] | None = None,
        ending: Ending = "before answer",
    ) -> str:
        """Render a conversation to text.

        Args:
            messages: messages as for Transformers' ``apply_chat_template``; the ``arguments`` of a tool call are an
                object, not text.
            tools: JSON schemas of functions, each as ``{"type": "function", "function": …}``.
            variables: further template variables, such as ``enable_thinking``.
            ending: where the text ends; see ``Ending``.

        Raises:
            UserError: the template refuses the messages, does not support tools, does not read one of ``variables``, or does not
                contain the last message verbatim (needed for the ending ``in message``).
        """
        goes_on = ending == "in message"
        if goes_on:
            messages = [
                *messages[:-1],
                messages[-1] | {"content": (messages[-1].get("content") or "") + CONTINUATION_MARK},
            ]
        for name in variables or {}:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise UserError(
                    f"chat_template_kwargs: this model's chat template does not read {name!r}; it reads {known}"
                )
        if not self._takes_tools and (tools or any(message.get("tool_calls") for message in messages)):
            raise UserError("this model's chat template does not support tools; leave tools and tool_calls out")
        try:
            text = within_limits(
                lambda: self._template.render(
                    messages=messages,
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=ending == "before answer",
                    **self._special_tokens,
                    **(variables or {}),
                )
            )
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything, to refuse messages
            raise UserError(f"the chat template rejects these messages: {error or type(error).__name__}") from None
        if not goes_on:
            return text
        before, mark, _ = text.rpartition(CONTINUATION_MARK)
        if not mark:
            raise UserError(
                "continue_final_message: this model's chat template modifies the last message, so it cannot be "
                "continued; leave continue_final_message out"
            )
        return before


class GenerationTag(Extension):
    """Jinja extension for ``{% generation %}…{% endgeneration %}``. The tag marks the assistant's text for training; it does not
    change the rendered text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja filter ``tojson`` without the HTML escapes of Jinja's own filter of this name."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
