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
"""Error type by HTTP status; otherwise ``api_error`` from 500 on, and the type of 400 below."""
TOO_LONG = "prompt is too long: "
"""Message prefix by which clients recognize that the conversation must be shortened."""


THREADS_REFUSED = "thread_unsupported_request"
"""Error code by which clients recognize that they must send whole conversations; the SDK's tool runners then do so."""


class ErrorFacts(ApiObject):
    """Machine-readable details of an error."""

    error_code: str
    unsupported: list[str]
    """Names of unsupported fields."""


class ErrorKind(ApiObject):
    """Type and message of an error, with details if clients act on them."""

    type: str
    message: str
    details: ErrorFacts | UnsetType = UNSET


class AnthropicError(ApiObject, kw_only=True, tag_field="type", tag="error"):
    """Body of every error response of this API, and the event of a failure in mid-stream."""

    error: ErrorKind
    request_id: str | None


def anthropic_error(error: ApiError, request_id: str | None) -> AnthropicError:
    """Convert an ``ApiError`` to Anthropic's format."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else KINDS[400])
    prefix = TOO_LONG if error.code == "context_length_exceeded" else ""
    details = ErrorFacts(THREADS_REFUSED, ["thread"]) if error.code == THREADS_REFUSED else UNSET
    return AnthropicError(error=ErrorKind(kind, prefix + error.message, details), request_id=request_id)


def no_threads() -> ApiError:
    """Error for the field ``thread``: the server stores no conversations."""
    return bad_request("thread: this server does not store conversations; send all messages", "thread", THREADS_REFUSED)
