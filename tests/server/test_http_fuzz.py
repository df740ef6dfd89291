"""Mutated HTTP at a real server: no 500, no silence, no memory that is kept; ``make fuzz`` runs it."""

from __future__ import annotations

import gzip
import json
import random
import socket
import time
from collections import Counter

import pytest
from fuzzing import MAX_GROWTH, MAX_SECONDS, mutate, mutate_json
from serving import Server, resident_bytes, serving

pytestmark = pytest.mark.slow


def request(method: str, path: str, body: bytes = b"", *fields: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


JSON = "Content-Type: application/json"
FILE = b"".join(
    (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\n\r\n--b--\r\n',
    )
)
SEEDS = [
    request("GET", "/health"),
    request("GET", "/v1/models", b"", "Connection: close"),
    request("GET", "/v1/cluster/trace?seconds=1"),
    request("GET", "/metrics") + request("GET", "/version"),
    request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 2, "seed": 3}', JSON),
    request("POST", "/v1/completions", b'{"prompt": [1, 2], "max_tokens": 1, "stream": true}', JSON),
    request(
        "POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}', JSON
    ),
    request("POST", "/v1/responses", b'{"input": [{"role": "user", "content": "a"}], "max_output_tokens": 1}', JSON),
    request("GET", "/v1/responses/resp_x/input_items?limit=3&order=asc&after=y"),
    request("POST", "/v1/responses/input_tokens", b'{"input": "a", "previous_response_id": "resp_x"}', JSON),
    request("POST", "/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": "a"}]}', JSON),
    request(
        "POST", "/rerank", b'{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "pooling": "last"}', JSON
    ),
    request("POST", "/score", b'{"text_1": "a", "text_2": ["b", "c"], "pooling": "last"}', JSON),
    request("POST", "/pooling", gzip.compress(b'{"input": "a"}', mtime=0), JSON, "Content-Encoding: gzip"),
    request("POST", "/ping") + request("GET", "/load"),
    request("DELETE", "/v1/files/file-x"),
    request("GET", "/v1/files/file-x/content", b"", "Range: bytes=0-1"),
    request("GET", "/v1/batches?limit=3&order=desc&after=x"),
    request("POST", "/v1/messages", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}', JSON),
    request("POST", "/v1/files", FILE, "Content-Type: multipart/form-data; boundary=b"),
    request(
        "POST",
        "/v1/batches",
        b'{"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}',
        JSON,
    ),
    request("POST", "/tokenize", b'{"prompt": "a b"}', JSON, "Expect: 100-continue"),
    request("POST", "/v1/requests/x/cancel", b"", "Origin: http://evil.example"),
    b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\n{"pro\r\n0\r\nx: y\r\n\r\n',
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES = [
    (path, json.dumps(body).encode())
    for path, body in (
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "stop": ["x"], "logit_bias": {"5": 1}, "echo": True},
        ),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(a|b)*c{2,3}"}}),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"grammar": 'start: "a" b+\nb: /[0-9]/'}, "stream": True},
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "top_logprobs": 2, "logprobs": True},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c", "content": "1"},
                ]
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [USER],
                "chat_template_kwargs": {"enable_thinking": False},
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "n",
                        "schema": {"type": "object", "properties": {"a": {"enum": [1, "x"]}}},
                        "strict": True,
                    },
                },
            },
        ),
        (
            "/v1/responses",
            {
                "input": [USER | {"content": "a"}],
                "max_output_tokens": 2,
                "text": {"format": {"type": "json_object"}},
                "tools": [TOOL["function"] | {"type": "function"}],
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 2,
                "messages": [USER],
                "system": [{"type": "text", "text": "s"}],
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "stop_sequences": ["x"],
            },
        ),
        ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 192, "encoding_format": "base64"}),
        ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "pooling": "last"}),
        ("/tokenize", {"messages": [USER], "add_generation_prompt": True, "return_token_strs": True}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
    )
]
"""JSON that is changed by its meaning, in a request that is whole."""


def post(path: str, body: bytes) -> bytes:
    """A whole request, after whose answer the server closes the connection."""
    return request("POST", path, body, JSON, "Connection: close")


def hostile(draw: random.Random) -> tuple[bytes, bool]:
    """A request that is broken anywhere, or a whole one whose body means something else; and whether it is whole."""
    if draw.randrange(2):
        return mutate(draw, SEEDS), False
    path, body = draw.choice(BODIES)
    return post(path, mutate_json(draw, [body])), True


def exchange(server: Server, data: bytes, is_whole: bool) -> bytes:
    """Whatever comes back until the server has nothing more to say.

    Args:
        is_whole: whether an answer comes without hanging up first; the server takes that for the end of a client.
    """
    answer = b""
    with server.connect() as connection:
        connection.settimeout(MAX_SECONDS)
        try:
            connection.sendall(data)
            if not is_whole:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                answer += piece
        except (BrokenPipeError, ConnectionResetError):
            pass  # it would not hear any more
    return answer


def test_mutated_requests_are_answered_or_closed(request: pytest.FixtureRequest, tmp_path):
    cases = request.config.getoption("--fuzz-cases") or 2000
    seed, counts = request.config.getoption("--fuzz-seed"), Counter()
    draw = random.Random(seed)
    with serving("--files-dir", str(tmp_path), "--max-model-len", "512") as server:  # where no other limit is left
        answers = [exchange(server, post(path, body), True) for path, body in BODIES]
        assert not [answer for answer in answers if not answer.startswith(b"HTTP/1.1 200 ")]
        before = resident_bytes(server)
        for number in range(cases):
            data, is_whole = hostile(draw)
            begin = time.monotonic()
            answer = exchange(server, data, is_whole)
            status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.1 ") else repr(answer[:20])
            counts[status] += 1
            assert status != "500", f"case {number} of seed {seed}: {data[:300]!r}"
            assert time.monotonic() - begin < MAX_SECONDS, f"case {number} of seed {seed}: {data[:300]!r}"
        assert server.complete().status == 200
        server.wait_idle()
        growth = resident_bytes(server) - before
        assert "Traceback" not in server.text
        assert growth < MAX_GROWTH, f"{growth >> 20} MiB more"
    print(f"{cases} requests, seed {seed}: {dict(counts)}, {growth >> 20} MiB more")
