"""ApiError: OpenAI's error object with its HTTP status, and one constructor for each way to fail.

Types and codes are those of OpenAI's API ("Error codes" in its guides) where it has one for the case. Its clients go by
the status: 400, 401, 404, 429 and from 500 on have exception classes of their own, and 408, 409, 429 and from 500 on are
tried again, unless the header ``x-should-retry`` says otherwise.
"""

from __future__ import annotations

import math

from labinfer.requests.openai.api_object import ApiObject

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
ENGINE_FAILED = "engine_failed"
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request that its client gave up; no RFC has one."""
MAX_MESSAGE_LENGTH, MAX_PARAM_LENGTH = 1000, 100
"""Characters of what is said of a wrong request: part of it is the request's own text."""
DO_NOT_RETRY = {"x-should-retry": "false"}


class ErrorDetails(ApiObject):
    """A failure in words, by its class, by the field of the request that is wrong, and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(ApiObject):
    """The body of every answer that is an error."""

    error: ErrorDetails


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of the HTTP response.
        message: for the caller to read; nothing that is none of its business.
        type: the class of the error.
        param: the field of the request that is wrong, if one is.
        code: the error for programs.
        headers: further ones of the response.
        retry_after_seconds: time after which the same request may succeed, for the header ``Retry-After``; None if unknown.
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
        if retry_after_seconds is not None:  # whole seconds, as RFC 9110 (section 10.2.3) has them
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_seconds)))

    @property
    def is_final(self) -> bool:
        """Whether the header ``x-should-retry`` says that the same request will fail again."""
        return DO_NOT_RETRY.items() <= self.headers.items()

    def body(self) -> ErrorAnswer:
        """The response's body, and the data of the error event of a stream."""
        return ErrorAnswer(ErrorDetails(self.message, self.type, self.param, self.code))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request cannot be answered as it is."""
    return ApiError(
        400, message[:MAX_MESSAGE_LENGTH], INVALID_REQUEST, param=param and param[:MAX_PARAM_LENGTH], code=code
    )


def too_long(message: str) -> ApiError:
    """The prompt does not fit in the context."""
    return bad_request(message, code="context_length_exceeded")


def unauthorized(message: str) -> ApiError:
    """No key, or none that is valid."""
    headers = {"WWW-Authenticate": "Bearer"}  # RFC 9110, section 15.5.2
    return ApiError(401, message, INVALID_REQUEST, code="invalid_api_key", headers=headers)


def wrong_host(host: str, flag: str) -> ApiError:
    """The request is for a server of another name (RFC 9110, section 15.5.20)."""
    message = f"this server is not to be reached by the name {_shorten(host)}; add it with {flag}, or use its address"
    return ApiError(421, message, INVALID_REQUEST, code="host_not_allowed")


def foreign_origin(origin: str, hosts_flag: str, origins_flag: str) -> ApiError:
    """The request comes from a page of another server."""
    message = (
        f"a page of {_shorten(origin)} may not change anything here; {hosts_flag} says which names are this server's, and "
        f"{origins_flag} which other pages may"
    )
    return ApiError(403, message, INVALID_REQUEST, code="origin_not_allowed")


def not_found_model(model: str) -> ApiError:
    """A model that is not served here."""
    message = f"the model {_shorten(model)} does not exist; GET /v1/models lists those that do"
    return ApiError(404, message, INVALID_REQUEST, param="model", code="model_not_found")


def not_found_route(method: str, path: str) -> ApiError:
    """A path that means nothing."""
    message = f"there is no {method} {_shorten(path)}; GET /openapi.json lists what there is"
    return ApiError(404, message, INVALID_REQUEST)


def not_found_request(request_id: str) -> ApiError:
    """No open request of this caller has the id."""
    message = f"no open request has the id {_shorten(request_id)}"
    return ApiError(404, message, INVALID_REQUEST, param="id", code="request_not_found")


def not_found_object(kind: str, id: str) -> ApiError:
    """Nothing of this kind that the caller keeps here has the id."""
    message = f"no {kind} has the id {_shorten(id)}"
    return ApiError(404, message, INVALID_REQUEST, param="id", code=f"{kind}_not_found")


def no_files() -> ApiError:
    """Nothing is kept here."""
    message = "this server keeps no files and runs no batches; start it with --files-dir DIR"
    return ApiError(404, message, INVALID_REQUEST, code="files_not_offered")


def method_not_allowed(method: str, path: str, allowed: list[str]) -> ApiError:
    """A path that is there for other methods."""
    methods = ", ".join(allowed)
    message = f"{method} is not allowed on {_shorten(path)}; use {methods}"
    return ApiError(405, message, INVALID_REQUEST, code="method_not_allowed", headers={"Allow": methods})


def timed_out(seconds: float) -> ApiError:
    """The server's time limit for a request has passed. To try again would take as long again."""
    message = f"the request was cancelled: it took longer than {seconds:g} seconds"
    return ApiError(408, message, "timeout", code="request_timeout", headers=dict(DO_NOT_RETRY))


def conflict(message: str, final: bool = False) -> ApiError:
    """The server's state does not allow it.

    Args:
        final: whether it will not later, either.
    """
    headers = dict(DO_NOT_RETRY) if final else {}
    return ApiError(409, message[:MAX_MESSAGE_LENGTH], INVALID_REQUEST, code="conflict", headers=headers)


def too_large(limit_bytes: int) -> ApiError:
    """The body is longer than may be."""
    message = f"the request's body is larger than {limit_bytes} bytes; send less at once"
    return ApiError(413, message, INVALID_REQUEST, code="request_too_large")


def unsupported_media_type(content_type: str) -> ApiError:
    """The body says of itself that it is something else than JSON. A web page may send that anywhere unasked."""
    given = _shorten(content_type) if content_type else "none"
    message = f"the body must be JSON and have the header Content-Type: application/json, not {given}"
    return ApiError(415, message, INVALID_REQUEST, code="unsupported_content_type")


def unsupported_form(message: str) -> ApiError:
    """The body does not say that it is a form with a file."""
    return ApiError(415, message, INVALID_REQUEST, code="unsupported_content_type")


def unsupported_encoding(encoding: str) -> ApiError:
    """The body is packed in a way that is not unpacked here; the header says in which it may be (RFC 9110, 15.5.16)."""
    message = f"the body must be sent as it is or with Content-Encoding: gzip, not {_shorten(encoding)}"
    headers = {"Accept-Encoding": "gzip"}
    return ApiError(415, message, INVALID_REQUEST, code="unsupported_content_encoding", headers=headers)


def too_large_head(limit_bytes: int) -> ApiError:
    """The lines before the body are longer than may be."""
    message = f"the request's head is larger than {limit_bytes} bytes; send less at once"
    return ApiError(431, message, INVALID_REQUEST, code="request_too_large")


def too_many_fields(limit: int) -> ApiError:
    """The head has more lines than may be."""
    message = f"the request's head has more than {limit} fields; send fewer"
    return ApiError(431, message, INVALID_REQUEST, code="request_too_large")


def rate_limited(message: str, retry_after_seconds: float, kind: str = "requests") -> ApiError:
    """This caller has had its share; ``kind`` says of what: requests or tokens."""
    return ApiError(429, message, kind, code="rate_limit_exceeded", retry_after_seconds=retry_after_seconds)


def cancelled(message: str = "the request was cancelled") -> ApiError:
    """Somebody asked for its end; a client that is gone will not see this."""
    return ApiError(CLIENT_CLOSED_REQUEST, message, "cancelled", code="request_cancelled")


def internal(request_id: str | None = None) -> ApiError:
    """Our fault. What went wrong stands in the log, under the request's id, and not here."""
    hint = f"; its log has more under the request id {_shorten(request_id)}" if request_id else ""
    return ApiError(500, f"the server failed on this request{hint}", SERVER_ERROR, code="internal_error")


def engine_failed(message: str) -> ApiError:
    """The engine has ended on its own; what went wrong stands in the log."""
    return ApiError(500, message, SERVER_ERROR, code=ENGINE_FAILED)


def given_up(message: str) -> ApiError:
    """The engine has ended on this request again and again."""
    return ApiError(500, message, SERVER_ERROR, code=ENGINE_FAILED, headers=dict(DO_NOT_RETRY))


def overloaded(message: str, retry_after_seconds: float) -> ApiError:
    """There is no room for anybody's requests now."""
    return ApiError(503, message, SERVER_ERROR, code="overloaded", retry_after_seconds=retry_after_seconds)


def draining(retry_after_seconds: float) -> ApiError:
    """The server is being stopped, and takes nothing new."""
    message = "the server is shutting down; send the request to another one, or try again later"
    return ApiError(503, message, SERVER_ERROR, code="draining", retry_after_seconds=retry_after_seconds)


def _shorten(text: str) -> str:
    """A caller's own text, quoted, and not at any length."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
