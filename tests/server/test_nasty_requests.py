"""Requests that no honest client sends, and what it gets that does: one clear refusal, or a plain answer."""

from __future__ import annotations

import http.client
import json

import pytest
from serving import Reply, Server, serving

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
PLAIN = {COMPLETIONS: '"prompt": "a", "max_tokens": 1', CHAT: '"messages": [{"role": "user", "content": "a"}]'}
NUMBERS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "n",
    "best_of",
    "num_beams",
    "max_context_len",
    "prompt_logprobs",
    "priority",
)
NO_SUCH_NUMBER = ("1e400", "-1e400", "9" * 400, "-" + "9" * 400, "1e308", "NaN", "Infinity", "-Infinity", '"1"', "true")
LONE_SURROGATES = (b'"\\ud800"', b'"\\udc00"', b'"a\\ud800b"', b'"\xed\xa0\x80"')
ANY = (
    "logits_processors",
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "stop",
    "logit_bias",
    "suffix",
)


@pytest.fixture(scope="module")
def server():
    with serving("--dtype", "float32", "--num-kv-blocks", "64", "--max-body-size", "1") as server:
        yield server
        server.wait_idle()
        assert "Traceback" not in server.text


def answers(server: Server, head: bytes, count: int = 1) -> list[Reply]:
    """To so many requests on one connection, sent as they are."""
    replies = []
    with server.connect() as connection, connection.makefile("rb") as file:
        connection.sendall(head)
        for _ in range(count):
            status, headers = int(file.readline().split()[1]), http.client.parse_headers(file)
            replies.append(Reply(status, headers, json.loads(file.read(int(headers["content-length"])))))
    return replies


def refused(reply: Reply, param: str | None) -> None:
    """It says so, and of which field."""
    reply.check_error(400, "invalid_request_error", None)
    assert reply.error["param"] == param, reply.body


class TestBodies:
    @pytest.mark.parametrize("field", NUMBERS)
    def test_numbers_that_are_none(self, server, field):
        for value in NO_SUCH_NUMBER:
            reply = server.ask("POST", COMPLETIONS, f'{{"prompt": "a", "{field}": {value}}}'.encode())
            param = field if value not in ("NaN", "Infinity", "-Infinity") else None  # which are no JSON
            refused(reply, param)

    @pytest.mark.parametrize("value", ["18446744073709551616", "-9223372036854775809", "9" * 400])
    def test_token_ids_that_no_message_could_carry(self, server, value):
        for field, given in (
            ("prompt", f"[{value}]"),
            ("prompt", f"[[1], [{value}]]"),
            ("allowed_token_ids", f"[{value}]"),
            ("stop_token_ids", f"[{value}]"),
            ("logit_bias", f'{{"{value}": 1}}'),
        ):
            body = f'{{"prompt": "a", "max_tokens": 1, "{field}": {given}}}'
            refused(server.ask("POST", COMPLETIONS, body.encode()), field)
        body = f'{{"tokens": [{value}]}}'
        refused(server.ask("POST", "/detokenize", body.encode()), "tokens")

    @pytest.mark.parametrize("depth", [50, 400, 900, 2000, 100_000])
    @pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
    def test_values_inside_of_values(self, server, depth, opening, closing):
        value = opening * depth + ("1" if closing == "}" else "") + closing * depth
        for path, plain in PLAIN.items():
            for field in ANY:
                reply = server.ask("POST", path, f'{{{plain}, "{field}": {value}}}'.encode())
                reply.check_error(400, "invalid_request_error", None)

    @pytest.mark.parametrize("text", LONE_SURROGATES)
    def test_half_characters(self, server, text):
        bodies = [(COMPLETIONS, b'{"prompt": %b}'), (CHAT, b'{"messages": [{"role": "user", "content": %b}]}')]
        bodies += [(EMBEDDINGS, b'{"input": [%b]}'), ("/tokenize", b'{"prompt": %b}')]
        bodies += [
            (COMPLETIONS, b'{"prompt": "a", "%b": %%b}' % field) for field in (b"user", b"stop", b"model", b"suffix")
        ]
        bodies += [(COMPLETIONS, b'{"prompt": "a", %b: 1}')]
        for path, body in bodies:
            refused(server.ask("POST", path, body % text), None)

    def test_of_a_key_that_is_there_twice_the_last_counts(self, server):
        reply = server.ask("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 9, "prompt": "b", "max_tokens": 1}')
        assert reply.status == 200
        assert reply.body["usage"]["completion_tokens"] == 1

    def test_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(self, server):
        text = "a" * 900_000
        bodies = [
            (COMPLETIONS, {"prompt": text}),
            (COMPLETIONS, {"prompt": ["a", text]}),
            (EMBEDDINGS, {"input": text}),
        ]
        bodies += [(CHAT, {"messages": [{"role": "user", "content": text}]}), ("/tokenize", {"prompt": text})]
        bodies += [(COMPLETIONS, {"prompt": [1] * 300_000})]
        for path, body in bodies:
            reply = server.ask("POST", path, body)
            reply.check_error(400, "invalid_request_error", "context_length_exceeded")
            assert reply.error["message"].startswith("This model's maximum context length is ")

    def test_long_json_key_is_refused(self, server):
        reply = server.ask("POST", COMPLETIONS, json.dumps({"k" * 500_000: 1}).encode())
        reply.check_error(400, "invalid_request_error", None)
        assert len(json.dumps(reply.body)) < 2000

    @pytest.mark.parametrize(
        "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "é"]
    )
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, EMBEDDINGS, "/tokenize", "/detokenize"])
    def test_body_that_does_not_say_that_it_is_json(self, server, content_type, path):
        """A web page of anybody's may make a browser send such ones to any address, without asking there first."""
        reply = server.ask("POST", path, b'{"prompt": "a"}', **{"Content-Type": content_type})
        reply.check_error(415, "invalid_request_error", "unsupported_content_type")

    @pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
    def test_body_that_says_so_in_other_words(self, server, content_type):
        reply = server.ask("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 1}', **{"Content-Type": content_type})
        assert reply.status == 200

    def test_pieces(self, server):
        body = b'{"prompt": "a", "max_tokens": 1}'
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert answers(server, head + pieces)[0].status == 200
        too_many = b"%x\r\n" % (2 << 20) + b" " * (2 << 20) + b"\r\n0\r\n\r\n"
        answers(server, head + too_many)[0].check_error(413, "invalid_request_error", "request_too_large")


class TestHeads:
    @pytest.mark.parametrize(
        "path",
        [
            "/v1/models/",
            "/v1/models/%ff%fe",
            "/v1/models/%00",
            "/v1/models/a%0d%0aX:y",
            "/v1/models/..%2fdemo",
            "/v1/models/%",
        ],
    )
    def test_models_that_are_none(self, server, path):
        assert server.ask("GET", path).status == 404

    @pytest.mark.parametrize(
        "path", ["/health/", "//health", "/v1/completions/", "/v1/requests//cancel", "/%ff", "/" + "a" * 9999]
    )
    @pytest.mark.parametrize("host", [b"localhost", b"127.0.0.1:1", b"[::1]:8000", b""])
    def test_paths_that_lead_nowhere(self, server, path, host):
        head = b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (path.encode(), host)
        reply = answers(server, head)[0]
        reply.check_error(404, "invalid_request_error", None)
        assert "location" not in reply.headers

    @pytest.mark.parametrize(
        "host", [b"[", b"\xff", b"x", b"evil.example:8000", b"localhost.evil.example", b"127.0.0.1.a"]
    )
    @pytest.mark.parametrize("head", [b"GET /v1/models", b"PUT /v1/models", b"GET /nothing"])
    def test_name_that_is_none_of_the_servers(self, server, host, head):
        reply = answers(server, b"%b HTTP/1.1\r\nHost: %b\r\n\r\n" % (head, host))[0]
        reply.check_error(421, "invalid_request_error", "host_not_allowed")
        assert "--allowed-hosts" in reply.error["message"]

    @pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://localhost:1", "https://", "é"])
    def test_page_of_another_server_changes_nothing(self, server, origin):
        reply = server.ask("POST", "/v1/requests/x/cancel", b"", Origin=origin)
        reply.check_error(403, "invalid_request_error", "origin_not_allowed")
        assert server.ask("GET", "/v1/models", Origin=origin).status == 200

    def test_page_of_this_server_may_ask(self, server):
        assert server.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}, Origin=server.url).status == 200

    def test_head_alone_is_that_of_the_answer(self, server):
        full, head = server.ask("GET", "/v1/models"), server.ask("HEAD", "/v1/models")
        assert (head.status, head.body) == (200, "")
        for name in ("content-type", "content-length"):
            assert head.headers[name] == full.headers[name]
        assert server.ask("HEAD", COMPLETIONS).status == 405

    @pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
    def test_methods_that_are_not_there(self, server, method):
        for path, allowed in (("/v1/models", "GET, HEAD"), (COMPLETIONS, "POST"), ("/v1/requests/x/cancel", "POST")):
            reply = server.ask(method, path)
            reply.check_error(405, "invalid_request_error", "method_not_allowed")
            assert reply.headers["allow"] == allowed

    @pytest.mark.parametrize("given", ["", "a b", "é", "a" * 65, "a/b", "a\tb", '"', "a,b"])
    def test_id_that_cannot_be_one_is_not_taken(self, server, given):
        reply = server.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **{"x-request-id": given})
        assert reply.status == 200
        assert reply.headers["x-request-id"] not in ("", given)
        assert reply.body["id"] == "cmpl-" + reply.headers["x-request-id"]

    def test_requests_sent_ahead_are_answered_in_their_order(self, server):
        body = b'{"prompt": "a", "max_tokens": 3}'
        work = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
            % len(body)
        )
        parts = [work + b"x-request-id: r%d\r\n\r\n" % number + body for number in range(4)]
        parts.insert(2, b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nx-request-id: none\r\n\r\n")
        replies = answers(server, b"".join(parts), len(parts))
        assert [reply.headers["x-request-id"] for reply in replies] == ["r0", "r1", "none", "r2", "r3"]
        assert [reply.status for reply in replies] == [200, 200, 404, 200, 200]
