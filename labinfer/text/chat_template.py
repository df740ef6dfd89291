"""A checkpoint's chat template, rendered in a sandbox: templates are programs that come with the weights."""

from __future__ import annotations

import json
from datetime import datetime

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from labinfer.errors import UserError


class ChatTemplate:
    """A Jinja template with what Hugging Face's templates expect to find in their environment.

    Args:
        source: the template.
        special_tokens: ``bos_token`` and the like, by name.

    Raises:
        UserError: the template does not parse.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template does not parse: {error}") from None
        self._special_tokens = special_tokens

    def render(self, messages: list[dict]) -> str:
        """The conversation as text, up to where the assistant's answer begins.

        Raises:
            UserError: the template refuses the messages.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"the chat template refuses these messages: {error}") from None


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
