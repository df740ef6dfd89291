"""Anthropic's error object (API reference, "Errors"), converted from ``ApiError``."""

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
"""Anthropic's error type for each HTTP status. A status that is not listed has ``invalid_request_error`` below 500, and
``api_error`` from 500 on."""
TOO_LONG = "prompt is too long: "
"""Beginning of an error message by which clients recognize that they must shorten the conversation."""


THREADS_REFUSED = "thread_unsupported_request"
"""Error code that tells clients to send whole conversations instead of ``thread``; the tool runners of Anthropic's SDK do so."""


class ErrorFacts(ApiObject):
    """Machine-readable details of an error: a code, and the request fields that caused it."""

    error_code: str
    unsupported: list[str]
    """Names of the request's fields that are not supported."""


class ErrorKind(ApiObject):
    """Type and message of an error, and details that clients act on."""

    type: str
    message: str
    details: ErrorFacts | UnsetType = UNSET


class AnthropicError(ApiObject, kw_only=True, tag_field="type", tag="error"):
    """Body of every error response of Anthropic's API, and the event that reports an error in mid-stream."""

    error: ErrorKind
    request_id: str | None


def anthropic_error(error: ApiError, request_id: str | None) -> AnthropicError:
    """Convert an ``ApiError`` to Anthropic's format."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else KINDS[400])
    prefix = TOO_LONG if error.code == "context_length_exceeded" else ""
    details = ErrorFacts(THREADS_REFUSED, ["thread"]) if error.code == THREADS_REFUSED else UNSET
    return AnthropicError(error=ErrorKind(kind, prefix + error.message, details), request_id=request_id)


def no_threads() -> ApiError:
    """Error for a request with the field ``thread``: the server stores no conversations."""
    return bad_request("thread: this server does not store conversations; send all messages", "thread", THREADS_REFUSED)
