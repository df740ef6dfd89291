"""Anthropic's error object (API reference, "Errors"), made of the errors of this server."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from labinfer.requests.openai.api_errors import ApiError, bad_request
from labinfer.requests.openai.api_object import ApiObject

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by the status of the answer; ``api_error`` from 500 on, else that of 400."""
TOO_LONG = "prompt is too long: "
"""Beginning of the message by which clients know that they have to shorten the conversation."""


THREADS_REFUSED = "thread_unsupported_request"
"""Code by which clients know that they have to send whole conversations; tool runners of the SDK then do so by themselves."""


class ErrorFacts(ApiObject):
    """A failure for programs."""

    error_code: str
    unsupported: list[str]
    """Fields that are not offered."""


class ErrorKind(ApiObject):
    """A failure by its class, in words and, where clients act on it, for programs."""

    type: str
    message: str
    details: ErrorFacts | UnsetType = UNSET


class AnthropicError(ApiObject, kw_only=True, tag_field="type", tag="error"):
    """The body of every answer of this API that is an error, and the event of a failure in mid-stream."""

    error: ErrorKind
    request_id: str | None


def anthropic_error(error: ApiError, request_id: str | None) -> AnthropicError:
    """An error in the form of this API."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else KINDS[400])
    prefix = TOO_LONG if error.code == "context_length_exceeded" else ""
    details = ErrorFacts(THREADS_REFUSED, ["thread"]) if error.code == THREADS_REFUSED else UNSET
    return AnthropicError(error=ErrorKind(kind, prefix + error.message, details), request_id=request_id)


def no_threads() -> ApiError:
    """Conversations are not kept between requests."""
    return bad_request("thread: conversations are not kept here; send all messages", "thread", THREADS_REFUSED)
