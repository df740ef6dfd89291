"""ErrorForm: the form in which an API tells its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from labinfer.requests.anthropic.errors import AnthropicError, anthropic_error
from labinfer.requests.openai.api_errors import ApiError, ErrorAnswer
from labinfer.requests.openai.api_object import ApiObject


@dataclass(frozen=True)
class ErrorForm:
    """A struct for errors, and how one is made."""

    name: str
    """Name of the API in ``/openapi.json``; empty for OpenAI's."""
    answer: type[ApiObject]
    make: Callable[[ApiError, str], ApiObject]
    """Makes the body of an error and of the id of its request."""


ANTHROPIC_ERRORS = ErrorForm("Anthropic", AnthropicError, anthropic_error)
VERSION_HEADER = "anthropic-version"
"""Header that every request of Anthropic's clients has."""
OPENAI_ERRORS = ErrorForm("", ErrorAnswer, lambda error, request_id: error.body())
