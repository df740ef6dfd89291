"""Clients that send as much as they can: the server's memory stays bounded, and others do not wait for them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import Server, process_bytes, resident_bytes, serving, wait_for

MIB = 1 << 20
LONG = json.dumps({"prompt": "the sea and the sky " * (15 * MIB // 20), "max_tokens": 1}).encode()
WORST = (
    b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 16000000\r\n\r\n" + b" " * MIB,
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * (MIB // 6),
    b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * (MIB // 5),
    b"GET /" + b"a" * 60_000,
    b"GET /openapi.json HTTP/1.1\r\n\r\n" * 20_000,
    b"GET /webui/vendor/katex.mjs HTTP/1.1\r\n\r\n",
)
"""Beginnings of messages that strangers send on a connection each."""


class Peak:
    """Most memory that a server had while this is open, beyond what it had before."""

    def __init__(self, server: Server):
        self._server, self._ends = server, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.begin = self.most = resident_bytes(server)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.02):
            self.most = max(self.most, resident_bytes(self._server))

    @property
    def grown(self) -> int:
        return self.most - self.begin


@pytest.fixture(scope="module")
def server():
    with serving("--dtype", "float32", "--num-kv-blocks", "64") as server:
        server.complete()
        yield server
        assert "Traceback" not in server.text


def answer_seconds(server: Server) -> float:
    begin = time.monotonic()
    assert server.complete(max_tokens=1).status == 200
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_long_bodies_at_once_take_little_memory_and_hold_up_nobody(server, field):
    body, path = LONG, "/v1/completions"
    if field == "messages":
        content = json.loads(LONG)["prompt"]
        body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
        path = "/v1/chat/completions"
    alone = min(answer_seconds(server) for _ in range(5))
    with Peak(server) as peak, ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(server.ask, "POST", path, body) for _ in range(12)]
        waits = []
        while not all(reply.done() for reply in replies):
            waits.append(answer_seconds(server))
    statuses = [reply.result().status for reply in replies]
    print(f"{peak.grown / MIB:.0f} MiB, {max(waits) - alone:.3f} s longer, {statuses}")
    assert set(statuses) <= {400, 429, 503} and 400 in statuses
    assert peak.grown < 300 * MIB
    assert max(waits) - alone < 1.0
    wait_for(lambda: resident_bytes(server) - peak.begin < 100 * MIB, 15.0)


@pytest.mark.slow
@pytest.mark.timing
def test_strangers_doing_their_worst_take_little_memory(server):
    connections: list[socket.socket] = []
    with Peak(server) as peak:
        for number in range(1000):
            connection = server.connect()
            connection.setblocking(False)
            try:
                connection.send(WORST[number % len(WORST)])
            except OSError:
                pass
            connections.append(connection)
        waits, until = [], time.monotonic() + 10
        while time.monotonic() < until:
            for connection, message in zip(connections, WORST * 1000, strict=False):
                try:
                    connection.send(message[-65_536:])  # more of the same
                except OSError:
                    pass
            begin = time.monotonic()
            assert server.get("/health")[0] == 200
            waits.append(time.monotonic() - begin)
    for connection in connections:
        connection.close()
    common = sorted(waits)[int(0.95 * len(waits))]
    print(f"{peak.grown / MIB:.0f} MiB, /health within {common:.3f} s in 95 of 100, {max(waits):.3f} s in all")
    assert peak.grown < 200 * MIB
    assert common < 0.2


@pytest.mark.slow
def test_saturated_server_says_so(server):
    """Bodies that come and do not end fill the memory for bodies of their caller; the server is ready for others."""
    connections = []
    for _ in range(4):
        client = http.client.HTTPConnection(server.url.removeprefix("http://"))
        client.putrequest("POST", "/v1/completions")
        client.putheader("Content-Type", "application/json")
        client.putheader("Content-Length", str(16 * MIB))
        client.endheaders(b" " * (15 * MIB))
        connections.append(client)
    wait_for(lambda: server.ask("POST", "/v1/completions", b" " * MIB * 3).status == 429, 10.0)
    assert server.complete(max_tokens=1).status == 200
    for client in connections:
        client.close()
    wait_for(lambda: server.ask("POST", "/v1/completions", LONG).status == 400, 10.0)


@pytest.mark.slow
def test_known_form_does_not_wait_for_forty_hard_ones(server):
    known = {"structured_outputs": {"regex": "[a-c]{3}"}}

    def ask_known() -> float:
        begin = time.monotonic()
        assert server.complete(**known).status == 200
        return time.monotonic() - begin

    ask_known()
    alone = max(ask_known() for _ in range(2))

    def hard_form(number: int) -> dict:
        """Each takes the whole second of its trial, and would take minutes without a limit."""
        return {"allOf": [{"type": "string", "pattern": f"a{{{n},{900 + number}}}.*b"} for n in range(1, 40)]}

    with ThreadPoolExecutor(40) as threads:
        hard = [threads.submit(server.complete, structured_outputs={"json": hard_form(number)}) for number in range(40)]
        waits = []
        while not all(future.done() for future in hard):
            waits.append(ask_known())
            time.sleep(0.05)
    statuses = sorted({future.result().status for future in hard})
    print(f"known form: {alone:.2f} s alone, {max(waits):.2f} s at most beside 40 hard ones; these got {statuses}")
    assert set(statuses) <= {400, 429, 503}
    assert len(waits) >= 3 and max(waits) <= alone + 1


class SlowReader:
    """A client that reads a few bytes of a stream now and then, and the rest when it is told to."""

    def __init__(self, server: Server, body: bytes):
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.url.removeprefix("http://").partition(":")
        self._socket.connect((host, int(port)))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        self._socket.setblocking(False)

    def read_some(self) -> None:
        try:
            self._socket.recv(256)
        except BlockingIOError:
            pass

    def read_rest(self) -> None:
        self._socket.settimeout(60)
        end = b""
        while not end.endswith(b"0\r\n\r\n"):
            data = self._socket.recv(1 << 16)
            assert data, end
            end = (end + data)[-16:]
        self._socket.close()


@pytest.mark.slow
def test_memory_of_a_hundred_slow_readers_is_bounded():
    """A rank grows by the KV blocks that were never used before, and by nothing else; the gateway by what is unread."""
    num_blocks, num_tokens = 2048, 100
    pool_bytes = 96 * MIB  # as the server says of so many blocks of the demo model in float32
    body = json.dumps(
        {"prompt": "red blue", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "logprobs": 5}
    ).encode()
    with serving("--dtype", "float32", "--num-kv-blocks", str(num_blocks), "--max-num-seqs", "128") as server:
        server.complete(max_tokens=300, ignore_eos=True)
        assert "2048 blocks of 16 tokens per rank (96.0 MiB" in server.text
        gateway, ranks = server.gateway_pid, server.process.pid
        begin = process_bytes(gateway), process_bytes(ranks)
        grown = []
        for _ in range(2):
            before = server.metric("vllm:generation_tokens_total")
            readers = [SlowReader(server, body) for _ in range(100)]
            deadline = time.monotonic() + 120
            while server.metric("vllm:generation_tokens_total") < before + 100 * num_tokens:
                assert time.monotonic() < deadline
                for reader in readers:
                    reader.read_some()
                time.sleep(0.2)
            for reader in readers:
                reader.read_rest()
            grown.append((process_bytes(gateway) - begin[0], process_bytes(ranks) - begin[1]))
        print([(f"gateway {a / MIB:.0f} MiB", f"rank {b / MIB:.0f} MiB") for a, b in grown])
    assert all(of_rank < pool_bytes + 48 * MIB for _, of_rank in grown)
    assert all(of_gateway < 24 * MIB for of_gateway, _ in grown)
    assert grown[1][0] - grown[0][0] < 8 * MIB and grown[1][1] - grown[0][1] < pool_bytes // 3 + 8 * MIB
