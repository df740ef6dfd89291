"""Start real servers from tests, on a port of their own, and talk to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers import LAUNCH, ROOT, command, environment, free_port, kill_tree

START_SECONDS = 90.0


@dataclass
class Server:
    """A running ``launch.py serve``."""

    process: subprocess.Popen
    url: str
    log: Path
    key: str = ""
    """For its metrics, where it wants one."""

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, key: str = "") -> tuple[int, Any]:
        """Status and decoded body."""
        return self._ask(urllib.request.Request(self.url + path, headers=_authorization(key)))

    def post(self, path: str, body: Any, key: str = "", **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = _authorization(key) | {"Content-Type": "application/json"} | headers
        return self._ask(urllib.request.Request(self.url + path, data, headers))

    @staticmethod
    def _ask(request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status, data = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, data = error.code, error.read()
        try:
            return status, json.loads(data)
        except ValueError:
            return status, data.decode()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text = self.get("/metrics", self.key)
        values = [
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((name + "{", name + " "))
        ]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Until no request runs or waits and no KV block is held, as the server itself counts."""
        deadline = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while any(self.metric(name) for name in names):
            assert time.monotonic() < deadline, f"still at work after {seconds} s:\n{self.get('/metrics')[1]}"
            time.sleep(0.1)

    def stop(self, signum: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Ask for an orderly end; returns the launcher's exit status."""
        self.process.send_signal(signum)
        return self.process.wait(seconds)


@contextmanager
def serving(*args: str, launcher: str = "single", ranks: int = 1, **env: str) -> Iterator[Server]:
    """A server that takes requests; afterwards nothing of it is left.

    Args:
        args: flags beside ``--port``.
    """
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            command(launcher, ranks, LAUNCH, "serve", "--port", str(port), *args),
            cwd=ROOT,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", Path(log.name))
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
        try:
            if server.get("/ready")[0] == 200:
                return
        except OSError:
            pass
        assert server.process.poll() is None, f"it ended with {server.process.returncode}:\n{server.text}"
        assert time.monotonic() < deadline, f"not ready after {START_SECONDS} s:\n{server.text}"
        time.sleep(0.05)


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
