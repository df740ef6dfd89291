"""ErrorForm: the error format of an API (OpenAI's or Anthropic's)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from labinfer.requests.anthropic.errors import AnthropicError, anthropic_error
from labinfer.requests.openai.api_errors import ApiError, ErrorAnswer
from labinfer.requests.openai.api_object import ApiObject


@dataclass(frozen=True)
class ErrorForm:
    """The error format of an API: its schema, and the function that makes the body of an error response."""

    name: str
    """Name of the API in ``/openapi.json``; empty for OpenAI's."""
    answer: type[ApiObject]
    make: Callable[[ApiError, str], ApiObject]
    """Function that makes the body of an error response from an error and its request id."""


ANTHROPIC_ERRORS = ErrorForm("Anthropic", AnthropicError, anthropic_error)
VERSION_HEADER = "anthropic-version"
"""HTTP header that only Anthropic's clients send; it selects Anthropic's format."""
OPENAI_ERRORS = ErrorForm("", ErrorAnswer, lambda error, request_id: error.body())
