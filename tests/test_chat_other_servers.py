"""``launch.py chat`` with other engines' servers: their habits, and answers that are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from launchers import LAUNCH, command, pipe


@contextmanager
def canned(responses: list[str]) -> Iterator[str]:
    """A server that answers each connection with the next of these texts, whatever it is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for response in responses:
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):
                    connection.recv(65536)
                    connection.sendall(f"HTTP/1.1 {response}".encode("utf-8", "surrogateescape") if response else b"")
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        ("429 Too Many Requests\r\nRetry-After: 7\r\n\r\n" + '{"error": {"message": "too fast"}}', "too fast (HTTP 429); try again in 7 seconds"),
        ("503 Service Unavailable\r\n\r\n<h1>Busy</h1>", "<h1>Busy</h1> (HTTP 503)"),
        ("500 Oops\r\n\r\n", "Oops (HTTP 500)"),
        ('200 OK\r\n\r\ndata: {"choices": [{"delta": {"content": "Half"}}]}\n\nevent: error\ndata: {"error": {"message": "gave up"}}\n\n', "gave up"),
        ('200 OK\r\n\r\ndata: {"choices": [{"delta": {"content": "Half"}}]}\n\n', "closed the connection in the middle"),
        ("200 OK\r\n\r\ndata: nonsense\n\n", "invalid event from the server"),
        (f"200 OK\r\n\r\ndata: {100_000 * '['}\n\n", "invalid event from the server"),
        ('200 OK\r\n\r\ndata: {"choices": "\udcff"}\n\n', "invalid event from the server"),
        (f"500 Oops\r\n\r\n{100_000 * '['}", "(HTTP 500)"),
        ('200 OK\r\n\r\ndata: {"choices": ["x"]}\n\n', "invalid event from the server"),
        ('200 OK\r\n\r\ndata: {"choices": [{"delta": {"content": ["x"]}}]}\n\n', "invalid event from the server"),
        ('200 OK\r\n\r\ndata: {"usage": 5}\n\n', "invalid event from the server"),
        ('200 OK\r\nContent-Type: application/json\r\n\r\n{"choices": []}', "application/json instead of text/event-stream"),
        ('400 Bad Request\r\n\r\n{"object": "error", "message": "too hot"}', "too hot"),
        ("301 Elsewhere\r\n\r\n", "Elsewhere (HTTP 301)"),
        ("", "closed connection without response"),
    ],
)  # fmt: skip
def test_what_a_server_may_do_is_one_line_and_the_chat_goes_on(response, complaint):
    good = '200 OK\r\n\r\n: comment\r\ndata: {"choices": [{"index": 0, "delta": {"content": "well"}}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    with canned([response, good]) as url:
        done = pipe(command("single", 1, LAUNCH, "chat", "--url", url, "--model", "any"), "one\ntwo\n")
    assert done.stdout.splitlines()[-1] == "well"
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("labinfer: error: ")]
    assert len(errors) == 1 and complaint in errors[0]


def test_list_of_models_may_be_nonsense():
    with canned(["200 OK\r\n\r\n" + '{"data": [{"id": "\udcff"}]}']) as url:
        done = pipe(command("single", 1, LAUNCH, "chat", "--url", url), "one\n")
    assert done.returncode == 1 and "lists no models" in done.stderr and "Traceback" not in done.stderr


def test_server_without_tls_is_no_https():
    with canned(["400 Bad Request\r\n\r\n"]) as url:
        arguments = ("chat", "--url", url.replace("http:", "https:"), "--model", "any")
        done = pipe(command("single", 1, LAUNCH, *arguments), "one\n")
    assert done.returncode == 1 and "use http:// instead" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "pieces",
    [
        ': OPENROUTER PROCESSING\n\ndata: {"choices": null}\n\nretry: 3\nid: 1\nevent: message\ndata:{"error": null, "usage": null, '
        '"choices": [{"delta": {"role": "assistant", "content": "well"}}]}\n\ndata: [DONE]\n\n',
        'data: {"choices":\ndata: [{"delta": {"content": "well"}}]}\n\ndata: [DONE]',
        'data: {"choices": [{"delta": {"content": "well"}, "finish_reason": "stop"}]}\n\n',
        'data: {"choices": [{"delta": {"content": "we"}}]}\n\ndata: {"choices": [{"delta": null, "finish_reason": null}]}\n\n'
        'data: {"choices": [{"delta": {"content": "ll"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3.0}}',
        'data: {"choices": [{"delta": {"content": null, "refusal": "well"}}]}\n\ndata: [DONE]\n\n',
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_habits_of_other_servers(pieces, newline):
    with canned(["200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + pieces.replace("\n", newline)]) as url:
        done = pipe(command("single", 1, LAUNCH, "chat", "--url", url, "--model", "any"), "one\n/stats\n")
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert "?" not in done.stderr
