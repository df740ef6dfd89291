"""Start real servers from tests, on a port of their own, and talk to them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers import LAUNCH, ROOT, command, descendants, environment, free_port, kill_tree, without_torchrun
from openapi_check import check_reply
from process_tree import entries, is_running, rank_number

START_SECONDS = 90.0
ANSWER_SECONDS = 120.0
GATEWAY = "labinfer.server.gateway.main"


@dataclass
class Reply:
    """What came back."""

    status: int
    headers: http.client.HTTPMessage
    body: Any
    """Decoded, where it is JSON."""

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]

    def check_error(self, status: int, kind: str, code: str | None) -> None:
        """It is OpenAI's error object, of this type and code."""
        assert self.status == status, (self.status, self.body)
        assert (self.error["type"], self.error["code"]) == (kind, code), self.body
        assert self.error["message"]

    def check_retry_after(self, at_most: float) -> None:
        """It says so, in whole seconds."""
        assert 1 <= int(self.headers["Retry-After"]) <= at_most


@dataclass
class Server:
    """A running ``launch.py serve``."""

    process: subprocess.Popen
    url: str
    log: Path
    certificate: str = ""
    """File of the one that it has to show, where it speaks HTTPS."""

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def own_text(self) -> str:
        """Up to where torchrun begins its own account of a failure."""
        return without_torchrun(self.text)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    # Requests.

    def get(self, path: str, key: str = "") -> tuple[int, Any]:
        """Status and decoded body."""
        reply = self.ask("GET", path, key=key)
        return reply.status, reply.body

    def post(self, path: str, body: Any, key: str = "", **headers: str) -> tuple[int, Any]:
        reply = self.ask("POST", path, body, key, **headers)
        return reply.status, reply.body

    def ask(self, method: str, path: str, body: Any = None, key: str = "", **headers: str) -> Reply:
        """A whole reply, which is as ``/openapi.json`` says."""
        connection, response = self.open(method, path, body, key, **headers)
        with connection:
            data = response.read()
        if method != "HEAD":
            check_reply(method, path.partition("?")[0], response.status, response.headers, data)
        try:
            decoded = json.loads(data)
        except ValueError:
            decoded = data.decode()
        return Reply(response.status, response.headers, decoded)

    def open(
        self, method: str, path: str, body: Any = None, key: str = "", **headers: str
    ) -> tuple[socket.socket, http.client.HTTPResponse]:
        """A connection of its own, and the head of its response."""
        scheme, _, address = self.url.partition("://")
        if scheme == "https":
            context = ssl.create_default_context(cafile=self.certificate)
            client = http.client.HTTPSConnection(address, timeout=ANSWER_SECONDS, context=context)
        else:
            client = http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        client.request(method, path, data, _authorization(key) | {"Content-Type": "application/json"} | headers)
        connection = client.sock
        return connection, client.getresponse()

    def complete(self, key: str = "", **fields) -> Reply:
        """A short completion."""
        return self.ask("POST", "/v1/completions", {"prompt": "red blue", "max_tokens": 3} | fields, key)

    def connect(self) -> socket.socket:
        """For what is no request."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS)

    def stream(self, body: dict[str, Any], key: str = "", **headers: str) -> Stream:
        return Stream(self, body, key, **headers)

    # Figures.

    def metric(self, name: str, key: str = "", **labels: str) -> float:
        """The sum of a metric over its labels but these."""
        values = self.metrics(name, key, **labels)
        assert values, f"no metric {name} {labels}"
        return sum(values)

    def metrics(self, name: str, key: str = "", **labels: str) -> list[float]:
        _, text = self.get("/metrics", key)
        wanted = [re.compile(f'[{{,]{label}="{value}"') for label, value in labels.items()]
        return [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((name + "{", name + " ")) and all(label.search(line) for label in wanted)
        ]

    def wait_idle(self, seconds: float = 20.0, key: str = "") -> None:
        """Until no request runs or waits and no KV block is held, as the server itself counts."""
        deadline = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while any(self.metric(name, key) for name in names):
            assert time.monotonic() < deadline, f"still at work after {seconds} s:\n{self.get('/metrics', key)[1]}"
            time.sleep(0.05)

    # Processes.

    @property
    def processes(self) -> list[int]:
        """Everything below the launcher, and itself."""
        return [self.process.pid, *descendants(self.process.pid)]

    @property
    def gateway_pid(self) -> int:
        (pid,) = [pid for pid in self.processes if GATEWAY in entries(pid, "cmdline")]
        return pid

    def rank_pid(self, rank: int) -> int:
        """Of a rank that a launcher has started."""
        return next(
            pid
            for pid in self.processes
            if "serve" in (words := entries(pid, "cmdline")) and GATEWAY not in words and rank_number(pid) == rank
        )

    def stop(self, signum: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Ask for an orderly end; returns the launcher's exit status."""
        self.process.send_signal(signum)
        return self.process.wait(seconds)

    def wait_end(self, tree: list[int], seconds: float = 15.0) -> int:
        """Until all these processes are gone; returns the launcher's exit status."""
        status = self.process.wait(seconds)
        wait_for(lambda: not any(map(is_running, tree)), 5.0)
        return status


class Stream:
    """A streamed completion, read in the background as it comes, or a streamed chat completion.

    Args:
        body: without ``stream``; by default it does not end early. One with ``messages`` is a chat's.
    """

    def __init__(self, server: Server, body: dict[str, Any], key: str = "", **headers: str):
        is_chat = "messages" in body
        asked = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}
        body = ({} if is_chat else {"prompt": "red blue"}) | asked | body
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        self._connection, self._response = server.open("POST", path, body, key, **headers)
        self.status, self.headers = self._response.status, self._response.headers
        self.lines: list[str] = []
        self.was_cut = False
        """Whether the connection ended before the response did."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._response:
                self.lines.append(line.decode().rstrip("\n"))
        except (OSError, http.client.HTTPException):
            pass
        self.was_cut = "data: [DONE]" not in self.lines

    def wait_begun(self, seconds: float = 20.0) -> Stream:
        """Until the first piece of text is there."""
        assert self.status == 200, self.finish().lines
        wait_for(lambda: any(line.startswith("data: {") for line in self.lines), seconds)
        return self

    def finish(self, seconds: float = 30.0) -> Stream:
        """Until the response has ended, or the connection has."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the stream goes on after {seconds} s: {self.lines[-5:]}"
        self._connection.close()
        return self

    def hang_up(self) -> None:
        """As a client that has gone."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.finish()

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events if "choices" in event for choice in event["choices"])

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line.removeprefix("data: ")) for line in self.lines if line.startswith("data: {")]

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice["finish_reason"] for event in self.events for choice in event.get("choices", ())]
        return reasons[-1] if reasons else None

    @property
    def error(self) -> dict[str, Any] | None:
        """Of its error event, if it has one."""
        return next((event["error"] for event in self.events if "error" in event), None)


@contextmanager
def serving(
    *args: str,
    launcher: str = "single",
    ranks: int = 1,
    script: str = LAUNCH,
    supervised: bool = False,
    nodes: Sequence[str] = (),
    **env: str,
) -> Iterator[Server]:
    """A server that takes requests; afterwards nothing of it is left.

    Args:
        args: flags. Without ``--port`` it is on one that was free; ``--port 0`` lets it choose.
        nodes: as ``command`` takes them.
    """
    supervisor = [*command("single", 1, LAUNCH, "supervise"), "--"] if supervised else []
    flags = [] if "--port" in args else ["--port", str(free_port())]
    with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [*supervisor, *command(launcher, ranks, script, "serve", *flags, *args, nodes=nodes)],
            cwd=ROOT,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    certificate = str(args[args.index("--ssl-certfile") + 1]) if "--ssl-certfile" in args else ""
    server = Server(process, "", Path(log.name), certificate)
    try:
        _wait_ready(server)
        yield server
    except BaseException:
        print(server.text)  # pytest shows it with the failure
        raise
    finally:
        kill_tree(process)
        process.wait()
        os.unlink(log.name)


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if found := re.search(r"serving .* at (https?://\S+)/v1", server.text):
            server.url = found[1].replace("0.0.0.0", "127.0.0.1")
            assert server.get("/ready")[0] == 200, f"the address is told before requests are taken:\n{server.text}"
            return
        assert server.process.poll() is None, f"it ended with {server.process.returncode}:\n{server.text}"
        assert time.monotonic() < deadline, f"not ready after {START_SECONDS} s:\n{server.text}"
        time.sleep(0.05)


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def resident_bytes(server: Server) -> int:
    """Memory of all processes of a server."""
    return sum(map(process_bytes, server.processes))


def process_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # it has just ended
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0
