"""Errors: OpenAI's object, and what OpenAI's own client makes of each."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import openai
import pytest

from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError

ALL = {
    "bad_request": api_errors.bad_request("temperature must be from 0 to 100, not 200", "temperature"),
    "too_long": api_errors.too_long("This model's maximum context length is 2048 tokens"),
    "wrong_host": api_errors.wrong_host("evil.example", "--allowed-hosts"),
    "foreign_origin": api_errors.foreign_origin("http://evil.example", "--allowed-hosts", "--allowed-origins"),
    "too_many_fields": api_errors.too_many_fields(128),
    "unauthorized": api_errors.unauthorized("the API key is not valid"),
    "not_found_model": api_errors.not_found_model("gpt-5"),
    "not_found_route": api_errors.not_found_route("POST", "/v1/nothing"),
    "not_found_request": api_errors.not_found_request("req-1"),
    "not_found_object": api_errors.not_found_object("batch", "batch_1"),
    "no_files": api_errors.no_files(),
    "method_not_allowed": api_errors.method_not_allowed("PUT", "/v1/models", ["GET", "HEAD"]),
    "timed_out": api_errors.timed_out(600.0),
    "conflict": api_errors.conflict("a layout change is already in progress"),
    "too_large": api_errors.too_large(1 << 24),
    "unsupported_media_type": api_errors.unsupported_media_type("text/plain"),
    "unsupported_encoding": api_errors.unsupported_encoding("br"),
    "unsupported_form": api_errors.unsupported_form("Content-Type must be multipart/form-data"),
    "range_outside": api_errors.range_outside(9),
    "too_large_head": api_errors.too_large_head(1 << 16),
    "rate_limited": api_errors.rate_limited("the budget is used up", 2.1, "tokens"),
    "cancelled": api_errors.cancelled(),
    "internal": api_errors.internal("req-1"),
    "engine_failed": api_errors.engine_failed("the engine has failed"),
    "given_up": api_errors.given_up("the engine has failed twice on it"),
    "overloaded": api_errors.overloaded("1024 requests are open", 0.2),
    "draining": api_errors.draining(20),
}


def test_every_constructor_is_tested_here():
    names = {
        name
        for name, value in vars(api_errors).items()
        if getattr(value, "__annotations__", {}).get("return") == "ApiError"
    }
    assert names == set(ALL)


@pytest.mark.parametrize(
    ("name", "status", "kind", "param", "code"),
    [
        ("bad_request", 400, "invalid_request_error", "temperature", None),
        ("too_long", 400, "invalid_request_error", None, "context_length_exceeded"),
        ("conflict", 409, "invalid_request_error", None, "conflict"),
        ("foreign_origin", 403, "invalid_request_error", None, "origin_not_allowed"),
        ("wrong_host", 421, "invalid_request_error", None, "host_not_allowed"),
        ("too_many_fields", 431, "invalid_request_error", None, "request_too_large"),
        ("unauthorized", 401, "invalid_request_error", None, "invalid_api_key"),
        ("not_found_model", 404, "invalid_request_error", "model", "model_not_found"),
        ("not_found_route", 404, "invalid_request_error", None, None),
        ("not_found_object", 404, "invalid_request_error", "id", "batch_not_found"),
        ("no_files", 404, "invalid_request_error", None, "files_not_offered"),
        ("range_outside", 416, "invalid_request_error", None, "range_not_satisfiable"),
        ("unsupported_form", 415, "invalid_request_error", None, "unsupported_content_type"),
        ("not_found_request", 404, "invalid_request_error", "id", "request_not_found"),
        ("method_not_allowed", 405, "invalid_request_error", None, "method_not_allowed"),
        ("timed_out", 408, "timeout", None, "request_timeout"),
        ("too_large", 413, "invalid_request_error", None, "request_too_large"),
        ("unsupported_media_type", 415, "invalid_request_error", None, "unsupported_content_type"),
        ("unsupported_encoding", 415, "invalid_request_error", None, "unsupported_content_encoding"),
        ("too_large_head", 431, "invalid_request_error", None, "request_too_large"),
        ("rate_limited", 429, "tokens", None, "rate_limit_exceeded"),
        ("cancelled", 499, "cancelled", None, "request_cancelled"),
        ("internal", 500, "server_error", None, "internal_error"),
        ("engine_failed", 500, "server_error", None, "engine_failed"),
        ("given_up", 500, "server_error", None, "engine_failed"),
        ("overloaded", 503, "server_error", None, "overloaded"),
        ("draining", 503, "server_error", None, "draining"),
    ],
)
def test_error_has_its_status_type_param_and_code(name, status, kind, param, code):
    error = ALL[name]
    assert error.status == status
    body = msgspec.json.encode(error.body())
    assert json.loads(body) == {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def test_headers_say_what_to_do_next():
    headers = {name: error.headers for name, error in ALL.items() if error.headers}
    assert headers == {
        "unauthorized": {"WWW-Authenticate": "Bearer"},
        "method_not_allowed": {"Allow": "GET, HEAD"},
        "timed_out": {"x-should-retry": "false"},
        "unsupported_encoding": {"Accept-Encoding": "gzip"},
        "range_outside": {"Content-Range": "bytes */9"},
        "given_up": {"x-should-retry": "false"},
        "rate_limited": {"Retry-After": "3"},  # whole seconds, and not before
        "overloaded": {"Retry-After": "1"},
        "draining": {"Retry-After": "20"},
    }


def test_one_errors_headers_are_not_anothers():
    api_errors.timed_out(1).headers["x-more"] = "1"
    ApiError(400, "m", "t").headers["x-more"] = "1"
    assert "x-more" not in api_errors.timed_out(1).headers
    assert ApiError(400, "m", "t").headers == {}


@pytest.mark.parametrize(
    "make",
    [
        api_errors.not_found_model,
        lambda text: api_errors.not_found_route("GET", text),
        api_errors.unsupported_media_type,
        api_errors.internal,
    ],
)
def test_what_a_caller_sent_comes_back_short_and_visible(make):
    for text in ("x" * 10**6, "a\nb\x1b[2J\u2028", "\ud800"):
        message = make(text).message
        assert len(message) < 200 and message.isprintable()


def test_wrong_request_does_not_come_back_at_any_length():
    error = api_errors.bad_request("unknown field " + "x" * 10**6, "x" * 10**6)
    assert len(error.message) <= 1000 and len(error.param) <= 100


def test_internal_error_tells_nothing_of_the_inside():
    assert "req-1" in ALL["internal"].message
    assert api_errors.internal().message == "internal server error"


class Answering:
    """A server that answers everything with one error, and counts."""

    def __init__(self, error: ApiError):
        self.num_requests = 0
        answering = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                answering.num_requests += 1
                self.rfile.read(int(self.headers["Content-Length"]))
                body = msgspec.json.encode(error.body())
                self.send_response(error.status)
                for name, value in error.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Answering:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()


def ask(url: str, max_retries: int) -> openai.APIStatusError:
    client = openai.OpenAI(api_key="sk-0123456789", base_url=url, max_retries=max_retries)
    with client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}])
    return caught.value


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bad_request", openai.BadRequestError),
        ("unauthorized", openai.AuthenticationError),
        ("not_found_model", openai.NotFoundError),
        ("not_found_route", openai.NotFoundError),
        ("timed_out", openai.APIStatusError),
        ("too_large", openai.APIStatusError),
        ("rate_limited", openai.RateLimitError),
        ("cancelled", openai.APIStatusError),
        ("internal", openai.InternalServerError),
        ("overloaded", openai.InternalServerError),
        ("draining", openai.InternalServerError),
    ],
)
def test_openais_client_raises_the_right_class_with_all_fields(name, kind):
    error = ALL[name]
    with Answering(error) as server:
        raised = ask(server.url, max_retries=0)
    assert type(raised) is kind
    assert raised.status_code == error.status
    assert (raised.type, raised.param, raised.code) == (error.type, error.param, error.code)
    assert error.message in str(raised)


@pytest.mark.parametrize(("name", "num_requests"), [("timed_out", 1), ("cancelled", 1), ("bad_request", 1)])
def test_openais_client_does_not_try_again_what_would_end_the_same(name, num_requests):
    with Answering(ALL[name]) as server:
        ask(server.url, max_retries=2)
        assert server.num_requests == num_requests


def test_openais_client_comes_back_after_a_limit():
    with Answering(api_errors.rate_limited("too many", 0.1)) as server:
        ask(server.url, max_retries=1)
        assert server.num_requests == 2
