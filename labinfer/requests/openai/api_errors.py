"""ApiError: OpenAI's error object with its HTTP status; and a constructor for each kind of failure.

Types and codes are OpenAI's ("Error codes" in OpenAI's guides) for failures that OpenAI's API has, too. OpenAI's clients act on the
status: 400, 401, 404, 429 and 5xx have exception classes, and 408, 409, 429 and 5xx are retried, unless the header
``x-should-retry`` says otherwise.
"""

from __future__ import annotations

import math

from labinfer.requests.openai.api_object import ApiObject

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
ENGINE_FAILED = "engine_failed"
CLIENT_CLOSED_REQUEST = 499
"""HTTP status of a request whose client has disconnected. nginx uses it; no RFC defines one."""
MAX_MESSAGE_LENGTH, MAX_PARAM_LENGTH = 1000, 100
"""Maximum length, in characters, of ``message`` and of ``param`` in the error for an invalid request, as both quote the request."""
DO_NOT_RETRY = {"x-should-retry": "false"}


class ErrorDetails(ApiObject):
    """Content of OpenAI's error object: message, type, name of the invalid field, and machine-readable code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(ApiObject):
    """Body of every error response of OpenAI's API."""

    error: ErrorDetails


class ApiError(Exception):
    """An error that ends an HTTP request, with the status and body of its response.

    Args:
        status: HTTP status.
        message: text for the caller, without internal details.
        type: class of the error.
        param: name of the invalid field, if any.
        code: machine-readable code.
        headers: further response headers.
        retry_after_seconds: value of the header ``Retry-After``: time after which a retry may succeed; None if unknown.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers, self.retry_after_seconds = headers or {}, retry_after_seconds
        if retry_after_seconds is not None:  # whole seconds (RFC 9110, section 10.2.3)
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_seconds)))

    @property
    def is_final(self) -> bool:
        """Whether the response has ``x-should-retry: false``, so that clients do not retry."""
        return DO_NOT_RETRY.items() <= self.headers.items()

    def body(self) -> ErrorAnswer:
        """Body of the response; also the data of a stream's error event."""
        return ErrorAnswer(ErrorDetails(self.message, self.type, self.param, self.code))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error 400: the request is invalid."""
    return ApiError(
        400, message[:MAX_MESSAGE_LENGTH], INVALID_REQUEST, param=param and param[:MAX_PARAM_LENGTH], code=code
    )


def too_long(message: str) -> ApiError:
    """Error 400: the prompt exceeds the context length."""
    return bad_request(message, code="context_length_exceeded")


def unauthorized(message: str) -> ApiError:
    """Error 401: the API key is missing or invalid."""
    headers = {"WWW-Authenticate": "Bearer"}  # RFC 9110, section 15.5.2
    return ApiError(401, message, INVALID_REQUEST, code="invalid_api_key", headers=headers)


def wrong_host(host: str, flag: str) -> ApiError:
    """Error 421: the request is for another host name (RFC 9110, section 15.5.20)."""
    message = f"host name {_shorten(host)} is not allowed; add it with {flag}, or use the IP address of the server"
    return ApiError(421, message, INVALID_REQUEST, code="host_not_allowed")


def foreign_origin(origin: str, hosts_flag: str, origins_flag: str) -> ApiError:
    """Error 403: the request comes from a page of another origin."""
    message = (
        f"requests from pages of {_shorten(origin)} are not allowed to change anything; allow it with {hosts_flag} "
        f"if it is a name of this server, else with {origins_flag}"
    )
    return ApiError(403, message, INVALID_REQUEST, code="origin_not_allowed")


def not_found_model(model: str) -> ApiError:
    """Error 404: the server has no model of this name."""
    message = f"the model {_shorten(model)} does not exist; GET /v1/models lists the models"
    return ApiError(404, message, INVALID_REQUEST, param="model", code="model_not_found")


def not_found_route(method: str, path: str) -> ApiError:
    """Error 404: the path does not exist."""
    message = f"unknown route {method} {_shorten(path)}; GET /openapi.json lists all routes"
    return ApiError(404, message, INVALID_REQUEST)


def not_found_request(request_id: str) -> ApiError:
    """Error 404: the caller has no open request with this id."""
    message = f"no open request with id {_shorten(request_id)}"
    return ApiError(404, message, INVALID_REQUEST, param="id", code="request_not_found")


def not_found_object(kind: str, id: str, param: str = "id") -> ApiError:
    """Error 404: the caller has no object of this ``kind`` and id.

    Args:
        param: field or parameter of the request that has the id.
    """
    message = f"no {kind} with id {_shorten(id)}"
    return ApiError(404, message, INVALID_REQUEST, param=param, code=f"{kind}_not_found")


def no_files() -> ApiError:
    """Error 404: the server stores no files."""
    message = "files and batches are disabled; start the server with --files-dir DIR"
    return ApiError(404, message, INVALID_REQUEST, code="files_not_offered")


def method_not_allowed(method: str, path: str, allowed: list[str]) -> ApiError:
    """Error 405: the path exists for other methods only."""
    methods = ", ".join(allowed)
    message = f"{method} is not allowed on {_shorten(path)}; use {methods}"
    return ApiError(405, message, INVALID_REQUEST, code="method_not_allowed", headers={"Allow": methods})


def timed_out(seconds: float) -> ApiError:
    """Error 408: the request timeout has passed. Clients must not retry, as the retry would take just as long."""
    message = f"the request was cancelled: it took longer than {seconds:g} seconds"
    return ApiError(408, message, "timeout", code="request_timeout", headers=dict(DO_NOT_RETRY))


def conflict(message: str, final: bool = False) -> ApiError:
    """Error 409: the server's state does not allow the request.

    Args:
        final: whether a retry will fail, too.
    """
    headers = dict(DO_NOT_RETRY) if final else {}
    return ApiError(409, message[:MAX_MESSAGE_LENGTH], INVALID_REQUEST, code="conflict", headers=headers)


def too_large(limit_bytes: int) -> ApiError:
    """Error 413: the request body is too long."""
    message = f"the request body is larger than {limit_bytes} bytes; send a smaller request"
    return ApiError(413, message, INVALID_REQUEST, code="request_too_large")


def unsupported_media_type(content_type: str) -> ApiError:
    """Error 415: the content type of the body is not JSON. JSON is required, as web pages can send other content types to any site
    without a preflight request."""
    given = _shorten(content_type) if content_type else "none"
    message = f"the body must be JSON and have the header Content-Type: application/json, not {given}"
    return ApiError(415, message, INVALID_REQUEST, code="unsupported_content_type")


def unsupported_form(message: str) -> ApiError:
    """Error 415: the request body is not a form with a file."""
    return ApiError(415, message, INVALID_REQUEST, code="unsupported_content_type")


def unsupported_encoding(encoding: str) -> ApiError:
    """Error 415: the content encoding is not supported; ``Accept-Encoding`` names the supported one (RFC 9110,
    15.5.16)."""
    message = f"the body must be uncompressed or have Content-Encoding: gzip, not {_shorten(encoding)}"
    headers = {"Accept-Encoding": "gzip"}
    return ApiError(415, message, INVALID_REQUEST, code="unsupported_content_encoding", headers=headers)


def range_outside(num_bytes: int) -> ApiError:
    """Error 416: the requested range begins after the end of the file."""
    message = f"the range begins after the file's {num_bytes} bytes; request an earlier range"
    headers = {"Content-Range": f"bytes */{num_bytes}"}  # RFC 9110, section 15.5.17
    return ApiError(416, message, INVALID_REQUEST, code="range_not_satisfiable", headers=headers)


def too_large_head(limit_bytes: int) -> ApiError:
    """Error 431: the request header is too long."""
    message = f"the request headers are larger than {limit_bytes} bytes; send smaller headers"
    return ApiError(431, message, INVALID_REQUEST, code="request_too_large")


def too_many_fields(limit: int) -> ApiError:
    """Error 431: the request has too many header fields."""
    message = f"the request has more than {limit} headers; send fewer"
    return ApiError(431, message, INVALID_REQUEST, code="request_too_large")


def rate_limited(message: str, retry_after_seconds: float, kind: str = "requests") -> ApiError:
    """Error 429: the caller has reached a limit of requests or tokens (``kind``)."""
    return ApiError(429, message, kind, code="rate_limit_exceeded", retry_after_seconds=retry_after_seconds)


def cancelled(message: str = "the request was cancelled") -> ApiError:
    """Error 499: the request was cancelled; a disconnected client does not see it."""
    return ApiError(CLIENT_CLOSED_REQUEST, message, "cancelled", code="request_cancelled")


def internal(request_id: str | None = None) -> ApiError:
    """Error 500: an internal failure. Details are in the log under the request id, not in the response."""
    hint = f"; see the server log for request id {_shorten(request_id)}" if request_id else ""
    return ApiError(500, f"internal server error{hint}", SERVER_ERROR, code="internal_error")


def engine_failed(message: str) -> ApiError:
    """Error 500: the engine has failed; details are in the log."""
    return ApiError(500, message, SERVER_ERROR, code=ENGINE_FAILED)


def given_up(message: str) -> ApiError:
    """Error 500: the engine has failed on this request repeatedly, so clients must not retry."""
    return ApiError(500, message, SERVER_ERROR, code=ENGINE_FAILED, headers=dict(DO_NOT_RETRY))


def overloaded(message: str, retry_after_seconds: float) -> ApiError:
    """Error 503: the server has reached a limit that all callers share."""
    return ApiError(503, message, SERVER_ERROR, code="overloaded", retry_after_seconds=retry_after_seconds)


def draining(retry_after_seconds: float) -> ApiError:
    """Error 503: the server is shutting down and accepts no requests."""
    message = "the server is shutting down; try again later"
    return ApiError(503, message, SERVER_ERROR, code="draining", retry_after_seconds=retry_after_seconds)


def _shorten(text: str) -> str:
    """``text``, a part of a request, in quotes and shortened to 80 characters."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
