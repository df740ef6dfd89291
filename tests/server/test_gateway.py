"""Keys, limits, time, and clients that go away or dawdle: the server as a nasty client meets it, on one rank."""

from __future__ import annotations

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import Server, Stream, serving, wait_for

from labinfer.server.gateway.endpoints import API

ALICE, BOB, CAROL = "sk-alice-0123456789", "sk-bob-0123456789", "sk-carol-0123456789"
OPEN = ("/health", "/ready", "/ping", "/version", "/openapi.json")
SMALL = ("--dtype", "float32", "--num-kv-blocks", "512")
JSON = "Content-Type: application/json\r\n"
LONG_TEXT = "the sea and the sky and the wind over the water " * 8


# Keys, on a port that the server chose, with a log in JSON.


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# who may\ncarol {CAROL}\n")
    flags = ("--api-key", ALICE, "--api-key", BOB, "--api-key-file", str(file), "--log-json", "--port", "0")
    with serving(*SMALL, *flags, "--log-level", "debug") as server:
        yield server


class TestKeys:
    @pytest.mark.parametrize("endpoint", API, ids=lambda endpoint: endpoint.path)
    def test_route_answers_without_a_key_if_it_is_an_open_one(self, guarded, endpoint):
        path = endpoint.path.replace("{id}", "r1").replace("{model:path}", "demo")
        path += "?seconds=0" if path == "/v1/cluster/events" else ""  # which ends when the client goes
        for key in ("", "sk-mallory-0123456789", ALICE[:-1], ALICE + "x", CAROL.upper()):
            reply = guarded.ask(endpoint.method, path, b"{}" if endpoint.method == "POST" else None, key)
            if path in OPEN:
                assert reply.status == 200
            else:
                if path.startswith("/v1/messages"):
                    assert (reply.status, reply.error["type"]) == (401, "authentication_error")
                else:
                    reply.check_error(401, "invalid_request_error", "invalid_api_key")
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        for key in (ALICE, BOB, CAROL):
            reply = guarded.ask(endpoint.method, path, b"{}" if endpoint.method == "POST" else None, key)
            assert reply.status != 401

    @pytest.mark.parametrize(
        "header", [f"Basic {ALICE}", ALICE, f"Bearer{ALICE}", "Bearer", f"Bearer {ALICE},{BOB}", "\xff" * 9]
    )
    def test_what_is_no_bearer_of_a_key(self, guarded, header):
        reply = guarded.ask("GET", "/v1/models", Authorization=header)
        reply.check_error(401, "invalid_request_error", "invalid_api_key")

    def test_every_key_is_a_caller_with_a_cache_of_its_own(self, guarded):
        def cached(key: str, **fields) -> int:
            reply = guarded.complete(key, prompt=LONG_TEXT, **fields)
            return reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached(ALICE) == 0
        assert cached(ALICE) > 50
        assert cached(BOB) == cached(CAROL) == 0
        assert cached(BOB) > 50
        assert cached(ALICE, cache_salt="apart") == 0
        chat = {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 2}
        usages = [guarded.post("/v1/chat/completions", chat, key)[1]["usage"] for key in (ALICE, ALICE, BOB)]
        assert [usage["prompt_tokens_details"]["cached_tokens"] > 50 for usage in usages] == [False, True, False]

    def test_only_its_own_caller_cancels_a_request(self, guarded):
        stream = guarded.stream({"user": "ann"}, ALICE, **{"x-request-id": "mine"}).wait_begun()
        for key in (ALICE, BOB):
            status, listed = guarded.get("/v1/requests", key)
            (request,) = listed["data"]
            assert (status, listed["total"], request["id"], request["own"]) == (200, 1, "mine", key == ALICE)
            assert 0 < request["generated_tokens"] < request["max_tokens"] == 1500 and 0 < request["age"] < 20
            assert request["model"] == "demo" and request["prompt_tokens"] > 0
            assert (request["caller"], request["user"]) == ("key-1", "ann" if key == ALICE else None)
        for key in (BOB, CAROL):
            reply = guarded.ask("POST", "/v1/requests/cmpl-mine/cancel", b"", key)
            reply.check_error(404, "invalid_request_error", "request_not_found")
        assert guarded.post("/v1/requests/cmpl-mine/cancel", b"", ALICE)[0] == 200
        assert stream.finish().error["code"] == "request_cancelled"
        assert guarded.post("/v1/requests/cmpl-mine/cancel", b"", ALICE)[0] == 404
        stream = guarded.stream({}, ALICE, **{"x-request-id": "cmpl-mine"}).wait_begun()
        assert guarded.post("/v1/requests/cmpl-mine/cancel", b"", ALICE)[0] == 200  # by its own id or the answer's
        assert stream.finish().error["code"] == "request_cancelled"
        guarded.wait_idle(key=ALICE)

    def test_two_callers_may_choose_the_same_id(self, guarded):
        streams = [guarded.stream({"max_tokens": 200}, key, **{"x-request-id": "same"}) for key in (ALICE, BOB, ALICE)]
        assert [stream.finish().finish_reason for stream in streams] == ["length"] * 3
        assert len({stream.text for stream in streams}) == 1

    def test_keys_are_in_no_log_and_not_on_the_gateways_command_line(self, guarded):
        guarded.complete("sk-mallory-0123456789")
        for method in ("GET", "POST"):
            guarded.ask(method, f"/v1/models/{ALICE}", key=ALICE)
        for path in (f"/v1/{ALICE}", f"/{ALICE}/v1/models", f"/v1/modles%3Fkey={ALICE}&a=b"):
            assert guarded.ask("GET", path, key=ALICE).status == 404
        arguments = Path(f"/proc/{guarded.gateway_pid}/cmdline").read_text()
        for secret in (ALICE, BOB, CAROL, "sk-mallory"):
            assert secret not in guarded.text
            assert secret not in arguments

    def test_each_line_of_the_log_has_all_fields(self, guarded):
        sent = guarded.complete(CAROL, max_tokens=4, ignore_eos=True)
        refused, nowhere = guarded.complete("wrong-key"), guarded.ask("GET", "/v1/modles?key=secret")

        def found() -> dict[str, dict]:
            whole = (line for line in guarded.lines if line.startswith("{") and line.endswith("}"))
            return {line["id"]: line for line in map(json.loads, whole)}

        ids = {reply.headers["x-request-id"] for reply in (sent, refused, nowhere)}
        wait_for(lambda: ids <= found().keys(), 5.0)  # lines are written after the answers
        line = found()[sent.headers["x-request-id"]]
        assert (line["caller"], line["status"], line["route"]) == ("carol", 200, "/v1/completions")
        assert (line["model"], line["generated_tokens"], line["finish_reason"]) == ("demo", 4, "length")
        assert 0 < line["ttft_seconds"] <= line["total_seconds"] < 20
        lost = found()[nowhere.headers["x-request-id"]]
        assert (lost["status"], lost["route"]) == (404, "/v1/modles")
        assert all(each.keys() == line.keys() for each in found().values())
        assert {"alice", "anonymous", "carol", "key-1"} >= {each["caller"] for each in found().values()} - {"key-2"}

    def test_banner_says_where_it_is_and_who_may(self, guarded):
        assert guarded.url.rpartition(":")[2] != "0"
        assert "authentication: one of 3 API keys" in guarded.text


# Limits. Callers are users here, each test has its own.

ENDLESS = 10**6
"""Tokens of an answer that goes on until its client hangs up."""


def answer_endlessly(server: Server, user: str) -> Stream:
    return server.stream({"user": user, "max_tokens": ENDLESS})


def wait_open(server: Server, number: int) -> None:
    """Until so many requests run or await their turn."""
    wait_for(lambda: server.get("/v1/requests")[1]["total"] == number, 10)


@pytest.fixture(scope="module")
def limited():
    limits = {
        "max-concurrent-requests": 2,
        "max-waiting-per-caller": 1,
        "max-open-requests": 6,
        "max-num-seqs": 2,
        "max-queued-requests": 3,
    }
    flags = (text for name, value in limits.items() for text in (f"--{name}", str(value)))
    with serving(*SMALL, "--context-shift", *flags) as server:
        yield server


@pytest.fixture
def after_limits(limited):
    """Nothing leaks, whatever was refused."""
    yield limited
    limited.wait_idle()
    streams = [limited.stream({"max_tokens": 5, "user": f"later-{number}"}) for number in range(4)]
    assert [stream.finish().finish_reason for stream in streams] == ["length"] * 4


class TestLimits:
    def test_caller_has_so_many_at_once_and_so_many_more_in_a_queue(self, after_limits):
        server = after_limits
        first = [answer_endlessly(server, "ann").wait_begun() for _ in range(2)]
        with ThreadPoolExecutor() as threads:
            third = threads.submit(server.complete, user="ann", max_tokens=5)
            wait_open(server, 3)
            reply = server.complete(user="ann")
            reply.check_error(429, "requests", "rate_limit_exceeded")
            reply.check_retry_after(5)
            other = server.stream({"user": "ben"})
            assert other.status == 200
            other.hang_up()
            assert not third.done()
            first[0].hang_up()
            assert third.result(10).status == 200
        first[1].hang_up()

    def test_who_gives_up_in_the_queue_makes_room_in_it(self, after_limits):
        server = after_limits
        first = [answer_endlessly(server, "cleo").wait_begun() for _ in range(2)]
        body = json.dumps({"prompt": "red", "user": "cleo"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(6):
            with server.connect() as connection:
                connection.sendall(head + body)
                wait_open(server, 3)
                assert server.complete(user="cleo").status == 429
            wait_open(server, 2)
        with ThreadPoolExecutor() as threads:
            body = {"prompt": "red", "user": "cleo"}
            waiting = threads.submit(server.ask, "POST", "/v1/completions", body, **{"x-request-id": "q1"})
            wait_for(lambda: server.post("/v1/requests/q1/cancel", b"")[0] == 200 or waiting.done(), 5)
            waiting.result(5).check_error(499, "cancelled", "request_cancelled")
        for stream in first:
            stream.hang_up()

    def test_engines_queue_and_the_server_may_be_full(self, after_limits):
        server = after_limits
        streams = [answer_endlessly(server, user) for user in ("dan", "eli", "dan", "eli", "eve")]
        wait_for(lambda: server.metric("vllm:num_requests_waiting") == 3, 10)
        reply = server.complete(user="fay")
        reply.check_error(503, "server_error", "overloaded")
        reply.check_retry_after(5)
        with ThreadPoolExecutor() as threads:
            queued = threads.submit(server.complete, user="dan")
            wait_open(server, 6)
            reply = server.complete(user="gil")
            reply.check_error(503, "server_error", "overloaded")
            assert "the limit of 6 open requests is reached" in reply.error["message"]
            reply.check_retry_after(5)
            listed = server.get("/v1/requests")[1]
            assert (listed["running"], listed["total"]) == (2, 6), "the others wait on the host or in the gateway"
            assert [request["state"] for request in listed["data"]] == ["running"] * 2 + ["waiting"] * 4
            reply = server.ask("GET", "/ready")
            assert reply.status == 503 and "the server is saturated: 6 requests are open" in reply.error["message"]
            for stream in reversed(streams):
                stream.hang_up()
            assert queued.result(20).status == 200
        assert server.ask("GET", "/ready").status == 200

    def test_one_call_may_not_keep_everybody_waiting(self, after_limits):
        reply = after_limits.complete(prompt=[[5]] * 2048, n=2, user="jo")
        reply.check_error(400, "invalid_request_error", None)
        assert "2 outputs for each of 2048 prompts" in reply.error["message"]


@pytest.fixture(scope="module")
def budgeted():
    with serving(*SMALL, "--tokens-per-minute", "600") as server:
        yield server
        server.wait_idle()


class TestBudget:
    def test_it_is_used_up_by_prompts_and_by_answers(self, budgeted):
        for fields in ({"prompt": LONG_TEXT * 6}, {"max_tokens": 640, "ignore_eos": True}):
            user = f"guy-{len(fields)}"
            assert budgeted.complete(user=user, **fields).status == 200
            reply = budgeted.complete(user=user)
            reply.check_error(429, "tokens", "rate_limit_exceeded")
            reply.check_retry_after(60)
            assert budgeted.complete(user="hal").status == 200

    def test_prompt_that_fits_nowhere_costs_nothing(self, budgeted):
        for _ in range(2):
            reply = budgeted.complete(user="ian", prompt=[5] * 5000)
            reply.check_error(400, "invalid_request_error", "context_length_exceeded")
        assert budgeted.complete(user="ian").status == 200


# Time, and clients that go away or dawdle.


@pytest.fixture(scope="module")
def hasty():
    with serving(*SMALL, "--request-timeout", "2", "--max-body-size", "4") as server:
        yield server


class TestSlowAndGone:
    def test_request_that_takes_too_long_is_ended(self, hasty):
        begin = time.monotonic()
        reply = hasty.complete(max_tokens=1900, ignore_eos=True, n=8)
        assert 1.9 < time.monotonic() - begin < 4
        reply.check_error(408, "timeout", "request_timeout")
        assert reply.headers["x-should-retry"] == "false"
        hasty.wait_idle(2)
        stream = hasty.stream({"n": 8, "max_tokens": 1900}).finish()
        assert stream.status == 200
        assert stream.error["code"] == "request_timeout"
        assert stream.text
        hasty.wait_idle(2)

    def test_client_that_does_not_read_holds_nothing_for_longer(self, hasty):
        body = json.dumps({"prompt": "red", "n": 16, "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode()
        connection = hasty.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with connection:
            connection.sendall(head + body)
            wait_for(lambda: hasty.metric("vllm:num_requests_running") == 16, 5)
            hasty.wait_idle(4)

    def test_whoever_hangs_up_leaves_nothing_behind(self, hasty):
        body = json.dumps({"prompt": "red", "n": 4, "max_tokens": 1900, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode()
        aborted = hasty.metric("vllm:request_success_total", finished_reason="abort")
        for data in (head + body, head + body[:-1]):
            with hasty.connect() as connection:
                connection.sendall(data)
                if data.endswith(body):
                    wait_for(lambda: hasty.metric("vllm:num_requests_running") == 4, 1)
            hasty.wait_idle(1.3)  # before its time is up
        assert hasty.metric("vllm:request_success_total", finished_reason="abort") == aborted + 4

    def test_half_requests_and_aborted_uploads_do_not_hurt_others(self, hasty):
        expected = hasty.complete(temperature=0).body["choices"][0]["text"]
        halves = (
            b"",
            b"POST /v1/completions HT",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
            + b"{" * 70_000,
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        )
        held = []
        try:
            for number in range(400):
                held.append(hasty.connect())
                held[-1].sendall(halves[number % len(halves)])
            assert hasty.metric("labinfer:open_connections") >= 400
            begin = time.monotonic()
            assert hasty.complete(temperature=0).body["choices"][0]["text"] == expected
            assert hasty.get("/health")[0] == 200
            assert time.monotonic() - begin < 2
        finally:
            for connection in held:
                connection.close()
        wait_for(lambda: hasty.metric("labinfer:open_connections") < 10, 5)
        hasty.wait_idle(1)
        assert hasty.metric("labinfer:http_requests_total", route="/v1/completions", status="499") >= 200

    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (b"NONSENSE\r\n\r\n", 400),
            (b"GET / HTTP/9.9\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),  # TLS
            (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
            (b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            (b"GET /" + b"a" * 300_000, 431),
            (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 100_000, 431),
            (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n",
                413,
            ),
        ],
    )
    def test_what_is_no_request_gets_an_error_object(self, hasty, data, status):
        with hasty.connect() as connection:
            try:
                connection.sendall(data)
            except OSError:
                pass  # it has been answered before the end
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == status
            assert json.loads(response.read())["error"]["type"] == "invalid_request_error"
        assert "Traceback" not in hasty.text

    def test_others_do_not_wait_while_a_long_text_is_read(self, hasty):
        with ThreadPoolExecutor() as threads:
            long = threads.submit(hasty.complete, prompt="The quick brown fox. " * 150_000)
            times = []
            while not long.done():
                begin = time.monotonic()
                assert hasty.get("/health")[0] == 200
                times.append(time.monotonic() - begin)
        long.result().check_error(400, "invalid_request_error", "context_length_exceeded")
        assert max(times) < 0.5, sorted(times)[-5:]
