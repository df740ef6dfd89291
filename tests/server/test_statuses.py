"""Each operation of ``/openapi.json`` gives each error status that the document says it gives, with the body that it says."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from openapi_check import DOCUMENT, check_reply
from scripted_host import Gateway, Host, gateway, wait_ready
from serving import wait_for
from starlette.testclient import TestClient

from labinfer.server.gateway import app
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.gateway.options import MIB, ServerOptions
from labinfer.server.gateway.service import Service
from labinfer.server.link.frames import Accepted

KEY, OTHER_KEY = "a-key-of-these-tests", "another-key-of-them"
MESSAGES = [{"role": "user", "content": "red"}]
LONG_BYTES, HELD_BYTES = 200_000, 900_000
"""Together more than ``--max-body-memory``."""
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "red"},
    "/v1/embeddings": {"input": "red"},
    "/pooling": {"input": "red"},
    "/classify": {"input": "red"},
    **dict.fromkeys(("/score", "/v1/score"), {"text_1": "red", "text_2": "blue", "pooling": "last"}),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"), {"query": "red", "documents": ["blue"], "pooling": "last"}
    ),
    "/tokenize": {"prompt": "red"},
    "/detokenize": {"tokens": [3]},
    "/v1/responses": {"input": "red"},
    "/v1/responses/input_tokens": {"input": "red"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/batches": {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/cluster/layout": {"dtype": ["float32"]},
}
"""A valid body by path."""
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
NEEDS_CLASSIFIER = ("POST", "/classify")
"""Refused by the models of these tests, before anything runs."""
FORM = "multipart/form-data; boundary=line"


def operations(status: int) -> list[tuple[str, str]]:
    """Method and path template of the operations with an error ``status``."""
    return [place for place, operation in OPERATIONS.items() if "$ref" in operation["responses"].get(str(status), {})]


def has_body(method: str, template: str) -> bool:
    """Whether the operation reads JSON."""
    return method == "POST" and template in BODIES


class SilentHost(Host):
    """Accepts requests and layout changes, and never answers."""

    def _answer(self, key: str) -> None:
        self.link.send(Accepted(key))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Gateway]:
    """A gateway whose host never answers."""
    options = {
        "api_key": (KEY, OTHER_KEY),
        "files_dir": str(tmp_path_factory.mktemp("files")),
        "max_body_size": 1,
        "max_body_memory": 1,
        "max_file_size": 1,
        "request_timeout": 0.5,
    }
    with gateway(outlives_host=True, **options) as server, SilentHost(server, "red"):
        wait_ready(server)
        yield server


def ask(
    server: Gateway, method: str, template: str, *, key: str = KEY, body: dict | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of a reply to a valid request, but for what is given.

    Args:
        body: fields of the body that differ from the valid one; the path has no object's id.
        headers: with _ in place of -.
    """
    path = template.replace("{id}", "none").replace("{model}", "demo")
    data = json.dumps(BODIES[template] | (body or {})).encode() if has_body(method, template) else b""
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return send(server, method, path, data, sent | {name.replace("_", "-"): value for name, value in headers.items()})


def send(
    server: Gateway, method: str, path: str, data: bytes, headers: dict[str, str]
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def expect(status: int, method: str, template: str, reply: tuple[int, http.client.HTTPMessage, bytes]) -> None:
    """Check that the reply has this status, and is as the document says."""
    assert reply[0] == status, (method, template, reply)
    check_reply(method, template, *reply)


def test_error_400_without_a_body_is_a_message_that_is_no_http(server):
    for method, template in operations(400):
        if has_body(method, template):
            reply = ask(server, method, template, body={"unknown": 1})
        else:
            path = template.replace("{id}", "none").replace("{model}", "demo")
            with server.connect() as connection:
                connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nno field\r\n\r\n".encode())
                response = http.client.HTTPResponse(connection, method=method)
                response.begin()
                reply = response.status, response.headers, response.read()
        expect(400, method, template, reply)


def test_error_401_is_a_missing_key(server):
    for method, template in operations(401):
        expect(401, method, template, ask(server, method, template, key="wrong"))


def test_error_403_is_another_origin(server):
    for method, template in operations(403):
        expect(403, method, template, ask(server, method, template, Origin="https://other.example"))


def test_error_404_is_an_unknown_model_or_object(server):
    for method, template in operations(404):
        if template == "/v1/files":  # without a folder of files
            continue
        if template == "/v1/models/{model}":
            reply = send(server, method, "/v1/models/other", b"", {"Authorization": f"Bearer {KEY}"})
        elif has_body(method, template):
            reply = ask(server, method, template, body={} if template == "/v1/batches" else {"model": "other"})
        elif "{id}" in template:
            reply = ask(server, method, template)
        elif template == "/v1/batches":
            continue
        else:
            reply = send(server, method, f"{template}?model=other", b"", {"Authorization": f"Bearer {KEY}"})
        expect(404, method, template, reply)


def test_errors_of_models_have_anthropics_form_for_its_clients(server):
    for status, key, path in (
        (401, "wrong", "/v1/models"),
        (400, KEY, "/v1/models?limit=0"),
        (404, KEY, "/v1/models/other"),
    ):
        headers = {"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
        reply = send(server, "GET", path, b"", headers)
        expect(status, "GET", path.partition("?")[0], reply)
        assert json.loads(reply[2])["type"] == "error"


def test_error_404_is_a_server_without_files():
    with gateway(outlives_host=True) as server:
        for method, template in operations(404):
            if template.startswith(("/v1/files", "/v1/batches")):
                expect(404, method, template, ask(server, method, template))


def test_error_405_is_another_method(server):
    for method, template in operations(405):
        expect(405, method, template, ask(server, "PATCH", template))


def test_error_408_is_the_timeout(server):
    places = [place for place in operations(408) if place != NEEDS_CLASSIFIER]
    with ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda place: ask(server, *place), places))
    for (method, template), reply in zip(places, replies, strict=True):
        expect(408, method, template, reply)


def test_error_409_is_a_second_change_of_the_layout(server):
    for method, template in operations(409):
        replies = queue.Queue()
        for _ in range(2):
            change = threading.Thread(target=lambda: replies.put(ask(server, method, template)), daemon=True)  # noqa: B023
            change.start()  # one of both is never answered
        expect(409, method, template, replies.get(timeout=10))


def test_error_413_is_too_long_a_body(server):
    for method, template in operations(413):
        if template == "/v1/files":
            data = b'--line\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * (MIB + 1)
            headers = {"Content-Type": FORM, "Authorization": f"Bearer {KEY}"}
            reply = send(server, method, template, data, headers)
        else:
            reply = ask(server, method, template, body={"user": "x" * MIB})
        expect(413, method, template, reply)


def test_error_415_is_another_content_type_or_encoding(server):
    for method, template in operations(415):
        expect(415, method, template, ask(server, method, template, Content_Type="text/plain"))
        if has_body(method, template):
            expect(415, method, template, ask(server, method, template, Content_Encoding="br"))


def test_error_416_is_a_range_after_the_end(server):
    data = b'--line\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    data += b'--line\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nred\r\n--line--\r\n'
    headers = {"Content-Type": FORM, "Authorization": f"Bearer {KEY}"}
    id = json.loads(send(server, "POST", "/v1/files", data, headers)[2])["id"]
    for method, template in operations(416):
        path = template.replace("{id}", id)
        for wanted in ("bytes=3-", "bytes=3-5", "bytes=-0", "bytes=-000"):
            reply = send(server, method, path, b"", headers | {"Range": wanted})
            expect(416, method, template, reply)
            assert reply[1]["Content-Range"] == "bytes */3"
        for wanted in ("bytes=2-", "bytes=-9"):
            reply = send(server, method, path, b"", headers | {"Range": wanted})
            expect(206, method, template, reply)
        reply = send(server, method, path, b"", headers | {"Range": "bytes=3-", "If-Range": "another"})
        expect(200, method, template, reply)


def test_error_421_is_another_host(server):
    for method, template in operations(421):
        expect(421, method, template, ask(server, method, template, Host="other.example"))


def test_error_431_is_a_long_header(server):
    for method, template in operations(431):
        expect(431, method, template, ask(server, method, template, X_Long="x" * (1 << 17)))


@pytest.mark.parametrize(("status", "key"), [(429, KEY), (503, OTHER_KEY)])
def test_errors_429_and_503_are_bodies_that_fill_the_memory(server, status, key):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {MIB}\r\n\r\n"
    with ExitStack() as stack:

        def hold() -> None:
            stack.enter_context(server.connect()).sendall(head.encode() + b" " * HELD_BYTES)

        hold()
        for method, template in operations(status):
            if not has_body(method, template):
                continue

            def reply(method: str = method, template: str = template) -> tuple:
                path, headers = template, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
                return send(server, method, path, b" " * LONG_BYTES, headers)

            def is_full(reply=reply) -> bool:
                if reply()[0] == status:
                    return True
                hold()  # the server read the shorter body first, and refused the rest of the one that was held
                return False

            wait_for(is_full, 10)
            expect(status, method, template, reply())


def test_error_499_is_a_cancelled_request(server):
    for method, template in (place for place in operations(499) if place != NEEDS_CLASSIFIER):
        with ThreadPoolExecutor(1) as threads:
            reply = threads.submit(ask, server, method, template, x_request_id="the-one")
            cancel = "/v1/requests/the-one/cancel"
            wait_for(lambda cancel=cancel: reply.done() or ask(server, "POST", cancel)[0] == 200, 10)  # noqa: B023
            expect(499, method, template, reply.result())


def test_error_500_is_a_failing_handler(monkeypatch):
    async def fail(context) -> None:
        raise RuntimeError("a fault of this test")

    monkeypatch.setattr(app, "API", [_with_handler(endpoint, fail) for endpoint in app.API])
    client = TestClient(app.make_app(Service(ServerOptions(), ["demo"], AsyncLLMEngine())), base_url="http://localhost")
    for method, template in operations(500):
        reply = client.request(method, template.replace("{id}", "none").replace("{model}", "demo"))
        expect(500, method, template, (reply.status_code, reply.headers, reply.content))


def _with_handler(endpoint, handler: Callable):
    return app.Endpoint(
        **{name: getattr(endpoint, name) for name in endpoint.__dataclass_fields__} | {"handler": handler}
    )


def test_error_503_is_a_server_that_loads():
    with gateway(outlives_host=True) as server:
        for method, template in operations(503):
            if template != "/v1/batches":
                expect(503, method, template, ask(server, method, template))


def test_status_503_of_health_is_a_stalled_engine():
    places = [
        place for place, operation in OPERATIONS.items() if "$ref" not in operation["responses"].get("503", {"$ref"})
    ]
    assert places == [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
    with gateway(outlives_host=True, fault_timeout=0.5) as server, SilentHost(server, "red"):
        wait_for(lambda: server.get("/health")[0] == 503, 10)
        for method, template in places:
            expect(503, method, template, ask(server, method, template))


def test_every_error_status_has_a_test():
    told = {int(status) for operation in OPERATIONS.values() for status in operation["responses"] if int(status) >= 400}
    tested = {
        int(number) for name in globals() if name.startswith("test_error") for number in re.findall("[0-9]{3}", name)
    }
    assert told == tested
