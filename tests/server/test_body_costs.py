"""The time of the gateway that a body takes: it grows with the body's length, and others do not wait for it.

Times are of the gateway's processor, so that a busy machine changes little.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time

import pytest
from growing_bodies import Growth, growths
from serving import Server, serving

from labinfer.server.gateway.endpoints import API

MIB = 1 << 20
SIZES = [MIB >> 3 << power for power in range(8)]
"""Bytes of bodies, up to the limit."""
MARGIN = 1 << 12
"""Bytes of a body around the place that grows."""
MAX_GROWTH = 2.5
"""Times the seconds of half the body."""
NOISE_SECONDS = 0.1
"""Times below are as good as none."""
MAX_WAIT_SECONDS = 0.5
"""The gateway's time between a request to /health and its answer."""
GROWTHS = growths()
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def gateway_seconds(server: Server) -> float:
    """Processor time of the gateway so far (clock_getcpuclockid(3))."""
    return time.clock_gettime(~server.gateway_pid << 3 | 2)


class HealthProbe:
    """Asks for /health again and again while this is open."""

    def __init__(self, server: Server):
        self._server, self._ends = server, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._clock = ~server.gateway_pid << 3 | 2
        self.longest = 0.0
        """Most processor time of the gateway until an answer."""
        self.num_answers = 0
        self._error: Exception | None = None

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ends.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self.num_answers > 1
        assert self.longest <= MAX_WAIT_SECONDS, f"/health waited for {self.longest:.2f} s of the gateway's time"

    def _watch(self) -> None:
        client = http.client.HTTPConnection(self._server.url.removeprefix("http://"), timeout=120)
        try:
            while not self._ends.wait(0.05 if self.num_answers else 0) or self.num_answers < 2:
                begin = time.clock_gettime(self._clock)
                client.request("GET", "/health")
                assert client.getresponse().read()
                self.longest = max(self.longest, time.clock_gettime(self._clock) - begin)
                self.num_answers += 1
        except (OSError, http.client.HTTPException) as error:
            self._error = error
        finally:
            client.close()


@pytest.fixture(scope="module")
def server():
    # The probe's connection has to outlast the seconds in which this process makes a long body.
    options = ("--max-body-memory", "128", "--keep-alive", "120")
    with serving("--dtype", "float32", "--num-kv-blocks", "256", *options) as server:
        server.complete()
        yield server
        server.wait_idle()
        assert "Traceback" not in server.text


def cost(server: Server, growth: Growth, size: int, repeats: int = 1) -> tuple[float, int]:
    """The gateway's seconds for the body, the least of some repeats, and the answer's status."""
    body, seconds = growth.body(size - MARGIN), []
    for _ in range(repeats):
        begin = gateway_seconds(server)
        status = server.ask("POST", growth.path, body).status
        seconds.append(gateway_seconds(server) - begin)
    assert status < 500, f"{growth}: {status} with {size} bytes"
    return min(seconds), status


def check_growth(server: Server, growth: Growth) -> None:
    """Double the body up to the limit; once it is refused for little, the last size stands for those before it."""
    before, status = cost(server, growth, SIZES[0])
    refusals = int(status >= 400)
    for size in SIZES[1:]:
        if refusals > 2 and before < NOISE_SECONDS and size != SIZES[-1]:
            continue
        seconds, status = cost(server, growth, size)
        refusals = refusals + 1 if status >= 400 else 0
        if seconds > MAX_GROWTH * max(before, NOISE_SECONDS):
            before, _ = cost(server, growth, size // 2, 3)
            seconds, _ = cost(server, growth, size, 3)
        limit = MAX_GROWTH * max(before, NOISE_SECONDS)
        assert seconds <= limit, f"{growth}: {size} bytes took {seconds:.3f} s, and half of them {before:.3f} s"
        before = seconds


def test_every_route_with_a_body_is_tried():
    assert {growth.path for growth in GROWTHS} == {endpoint.path for endpoint in API if endpoint.body is not None}


@pytest.mark.parametrize("growth", random.Random(45).sample(GROWTHS, 8), ids=str)
def test_time_grows_with_the_body(server, growth):
    with HealthProbe(server):
        check_growth(server, growth)


@pytest.mark.slow
@pytest.mark.parametrize("path", dict.fromkeys(growth.path for growth in GROWTHS))
def test_time_grows_with_every_part_of_a_body(server, path):
    with HealthProbe(server):
        for growth in GROWTHS:
            if growth.path == path:
                check_growth(server, growth)


def tools(count: int, **fields) -> list[dict]:
    return [{"name": f"f{number}"} | fields for number in range(count)]


def turns(*blocks: dict) -> dict:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": list(blocks)}]}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
SMALL, LARGE = {"type": "text", "text": "a"}, {"type": "text", "text": "a" * (8 * MIB)}
FLOODS = {
    "tools of a response": (RESPONSES, {"input": "red", "tools": tools(100_000, type="function")}),
    "calls in a response": (RESPONSES, {"input": [CALL] * 100_000}),
    "tools of a message": (MESSAGES, turns(SMALL) | {"tools": tools(20_000)}),
    "blocks of a message": (MESSAGES, turns(*[SMALL] * 400_000)),
    "a long block beside short ones": (MESSAGES, turns(LARGE, *[SMALL] * 20_000)),
    "tools of a response to count": (f"{RESPONSES}/input_tokens", {"input": [CALL] * 100_000}),
    "blocks of a message to count": (
        f"{MESSAGES}/count_tokens",
        {"messages": turns(LARGE, *[SMALL] * 20_000)["messages"]},
    ),
}
"""Bodies that took a server down: a part of the time was quadratic in their lists."""


@pytest.mark.parametrize("name", FLOODS)
def test_flood_is_refused_at_once(server, name):
    path, fields = FLOODS[name]
    body = json.dumps(fields).encode()
    with HealthProbe(server):
        begin = gateway_seconds(server)
        reply = server.ask("POST", path, body)
        seconds = gateway_seconds(server) - begin
    assert reply.status == 400, reply.body
    assert seconds < 1.0
