"""Connections of clients that dawdle are ended, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import tracemalloc

import pytest
import uvicorn

from labinfer.server.gateway import client_connection
from labinfer.server.gateway.client_connection import ClientConnection

LIMIT = 0.3
"""Seconds of both bounds in tests of time."""
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
BIG = 1 << 24


@pytest.fixture(autouse=True)
def bounds(request, monkeypatch):
    """Short bounds in tests of time, which run alone; elsewhere a busy machine would end connections that nobody holds up."""
    seconds = LIMIT if request.node.get_closest_marker("timing") else 100 * LIMIT
    monkeypatch.setattr(client_connection, "REQUEST_SECONDS", seconds)
    monkeypatch.setattr(client_connection, "STALL_SECONDS", seconds)


class App:
    """Reads a request, waits, answers with what it read; or streams without end.

    Args:
        wait: seconds before it answers.
    """

    def __init__(self, wait: float = 0.0, streams: bool = False):
        self._wait, self._streams = wait, streams
        self.was_left = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.was_left.set()
                return
            body += message["body"]
            if not message["more_body"]:
                break
        await asyncio.sleep(self._wait)
        if not self._streams:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % BIG)]})
            await send({"type": "http.response.body", "body": body.ljust(BIG)})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watching = asyncio.create_task(receive())
        while not watching.done():
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            await asyncio.sleep(0)
        self.was_left.set()


@contextlib.asynccontextmanager
async def serving(app: App, max_connections: int = 0):
    """The address of a server of ``app``."""
    listener = socket.create_server(("127.0.0.1", 0))
    protocol = functools.partial(ClientConnection, max_connections=max_connections)
    config = uvicorn.Config(app, http=protocol, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    yield listener.getsockname()
    server.should_exit = True
    await serving


async def time_to_end(reader: asyncio.StreamReader) -> float:
    """How long the server keeps the connection."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    return clock() - begin


@pytest.mark.timing
@pytest.mark.parametrize("data", [b"", b"POST / HT", POST, POST + b"123"])
def test_request_that_does_not_come_ends_its_connection(data):
    async def run() -> None:
        app = App()
        async with serving(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(data)
            assert LIMIT * 0.9 < await time_to_end(reader) < LIMIT * 4
            if data.startswith(POST):
                await asyncio.wait_for(app.was_left.wait(), 1)
            writer.close()

    asyncio.run(run())


@pytest.mark.timing
def test_byte_at_a_time_does_not_help():
    async def run() -> None:
        async with serving(App()) as address:
            reader, writer = await asyncio.open_connection(*address)

            async def drip() -> None:
                for byte in POST * 10:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(LIMIT / 20)

            dripping = asyncio.create_task(drip())
            assert LIMIT * 0.9 < await time_to_end(reader) < LIMIT * 4
            dripping.cancel()
            writer.close()

    asyncio.run(run())


@pytest.mark.timing
def test_answer_may_take_longer_and_a_second_request_has_its_own_time():
    async def run() -> None:
        async with serving(App(wait=2 * LIMIT)) as address:
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(2):
                writer.write(POST + b"1234")
                await reader.readuntil(b"\r\n\r\n")
                assert (await reader.readexactly(BIG)).startswith(b"1234")
                await asyncio.sleep(1.5 * LIMIT)  # between two requests
            writer.write(POST + b"12")
            assert LIMIT * 0.9 < await time_to_end(reader) < LIMIT * 4
            writer.close()

    asyncio.run(run())


@pytest.mark.timing
def test_requests_sent_ahead_wait_for_the_answers_before_them():
    async def run() -> None:
        async with serving(App(wait=LIMIT)) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write((POST + b"1234") * 3 + POST)
            for _ in range(3):
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(BIG)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("cut", [0, 40, 130, 10_000])
def test_request_for_another_protocol_is_answered_in_this_one(protocol, cut):
    async def run() -> None:
        async with serving(App()) as address:
            reader, writer = await asyncio.open_connection(*address)
            fields = (
                b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n" % protocol
            )
            data = POST.replace(b"\r\n\r\n", b"\r\n" + fields + b"\r\n") + b"1234" + POST + b"5678"
            for part in (data[:cut], data[cut:]):
                writer.write(part)
                await asyncio.sleep(LIMIT / 10)
            for body in (b"1234", b"5678"):
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                assert (await reader.readexactly(BIG)).strip() == body
            writer.close()

    asyncio.run(run())


@pytest.mark.timing
def test_who_reads_nothing_is_given_up_and_who_reads_is_not():
    async def run() -> None:
        app = App(streams=True)
        async with serving(app) as address:
            # A size of its own, as the system's grows with what is read, to 32 MiB where it may.
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.connect(address)
            reader, writer = await asyncio.open_connection(sock=client, limit=1000)
            writer.write(POST + b"1234")
            for _ in range(20):
                await reader.readexactly(1 << 18)
                await asyncio.sleep(LIMIT / 10)
            assert not app.was_left.is_set()
            await asyncio.wait_for(app.was_left.wait(), 20)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"NONSENSE\r\n\r\n", 400, None),
        (b"GET /" + b"a" * (1 << 17), 431, "request_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (1 << 14), 431, "request_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 130, 431, "request_too_large"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * (1 << 14), 431, "request_too_large"),
        (CHUNKED + b"0\r\na: " + b"b" * (1 << 17), 431, "request_too_large"),
        (CHUNKED + b"1;" + b"x" * (1 << 17), 431, "request_too_large"),
        (CHUNKED + b"1;x=y" * (1 << 15), 431, "request_too_large"),
        (CHUNKED + b"00000001;xxxxxxxxxxx\r\na\r\n" * (1 << 14), 431, "request_too_large"),
    ],
)
def test_what_cannot_be_a_request_is_answered_in_openais_words(data, status, code):
    async def run() -> None:
        async with serving(App()) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(data)
            head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
            assert head.split()[1] == str(status).encode()
            assert json.loads(body)["error"]["code"] == code
            writer.close()

    asyncio.run(run())


def test_trailers_are_passed_over_and_small_chunks_may_come():
    async def run() -> None:
        async with serving(App()) as address:
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(2):
                writer.write(CHUNKED + b"1\r\na\r\n" * 100_000 + b"0\r\n" + b"x: y\r\n" * 200 + b"\r\n")
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                assert (await reader.readexactly(BIG)).strip() == b"a" * 100_000
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("rest", [b"a: b\r\n" * 10_000, b"a: " + b"b" * 65_536])
def test_trailers_without_end_take_no_memory(rest):
    """They come for as long as the server reads them."""

    async def run() -> None:
        async with serving(App()) as address:
            reader, writer = await asyncio.open_connection(*address)
            tracemalloc.start()
            writer.write(CHUNKED + b"0\r\n")
            with contextlib.suppress(ConnectionError):
                for _ in range(1000):
                    writer.write(rest)
                    await writer.drain()
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 4 << 20
            writer.close()

    asyncio.run(run())


@pytest.mark.timing
def test_too_many_requests_sent_ahead_end_the_connection():
    async def run() -> None:
        app = App(wait=LIMIT)
        async with serving(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write((POST + b"1234") * 100)
            assert await time_to_end(reader) < LIMIT
            writer.close()

    asyncio.run(run())


def test_body_that_nobody_reads_ends_its_connection_after_a_while(monkeypatch):
    monkeypatch.setattr(client_connection, "MAX_UNREAD", 1 << 20)

    async def refuse(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run() -> None:
        async with serving(refuse) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
            assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x" * (1 << 19))  # so much may come, by a client that sends before it reads
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    writer.write(b"x" * 10_000)
                    await writer.drain()
            writer.close()

    asyncio.run(run())


@pytest.mark.timing
def test_connection_that_waits_longest_makes_room_and_none_that_is_answered():
    async def run() -> None:
        app = App(streams=True)
        async with serving(app, max_connections=3) as address:
            connections = [await asyncio.open_connection(*address)]
            connections[0][1].write(POST + b"1234")
            await connections[0][0].readexactly(1000)
            for _ in range(3):
                connections.append(await asyncio.open_connection(*address))
                await asyncio.sleep(LIMIT / 20)
            assert await time_to_end(connections[1][0]) < LIMIT / 4
            assert not connections[2][0].at_eof() and not connections[3][0].at_eof()
            await connections[0][0].readexactly(1000)
            assert not app.was_left.is_set()
            for _, writer in connections:
                writer.close()

    asyncio.run(run())


def test_body_that_breaks_the_rules_is_answered_once_and_its_reader_let_go():
    async def run() -> None:
        app = App()
        async with serving(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
            await asyncio.sleep(LIMIT / 10)
            writer.write(b"no number\r\n")
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
            await asyncio.wait_for(app.was_left.wait(), 1)
            writer.close()

    asyncio.run(run())


def test_nonsense_in_the_middle_of_an_answer_ends_it(caplog):
    async def run() -> None:
        app = App(streams=True)
        async with serving(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(POST + b"1234")
            await reader.readexactly(10_000)
            writer.write(b"NONSENSE\r\n\r\n")
            await time_to_end(reader)
            await asyncio.wait_for(app.was_left.wait(), 1)
            writer.close()

    asyncio.run(run())
    assert "Traceback" not in caplog.text


def test_long_body_after_a_long_head_is_no_long_head():
    async def run() -> None:
        async with serving(App()) as address:
            reader, writer = await asyncio.open_connection(*address)
            length = 1 << 20
            writer.write(b"POST / HTTP/1.1\r\nx: " + b"y" * 60_000 + b"\r\nContent-Length: %d\r\n\r\n" % length)
            writer.write(b"z" * length)
            assert b"200" in await reader.readline()
            writer.close()

    asyncio.run(run())


def test_at_the_end_half_a_request_is_not_waited_for():
    async def run() -> float:
        async with serving(App()) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(POST)
            await asyncio.sleep(LIMIT / 3)
            begin = asyncio.get_running_loop().time()
        writer.close()
        return asyncio.get_running_loop().time() - begin

    assert asyncio.run(run()) < 0.9
