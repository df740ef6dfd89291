"""Helpers of benchmarks of a server: a running server, and requests to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LAUNCH = Path(__file__).parent.parent / "launch.py"
LAUNCHERS = {
    "alone": ([sys.executable], []),
    "mpirun": (["mpirun", "-n", "2", sys.executable], ["-pp", "2"]),
    "torchrun": (["torchrun", "--nproc-per-node", "2"], ["-pp", "2"]),
}
"""Words before ``launch.py serve``, and flags after it, by launcher."""


@dataclass(frozen=True)
class Served:
    """A server that is ready."""

    pid: int
    """Process id of the server's launcher."""
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def completion(self, **fields) -> urllib.request.Request:
        """A request for the likeliest tokens, without an end."""
        body = json.dumps({"temperature": 0, "ignore_eos": True} | fields)
        return urllib.request.Request(f"{self.url}/v1/completions", body.encode(), {"Content-Type": "application/json"})


@contextmanager
def serving(
    launcher: str | tuple[list[str], list[str]], model: str, *flags: object, supervised: bool = False
) -> Iterator[Served]:
    """Start a server, wait until it is ready, and end it.

    Args:
        launcher: a key of ``LAUNCHERS``, or words like those there.
        supervised: whether ``launch.py supervise`` starts it, and again when its ranks die.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before, after = LAUNCHERS[launcher] if isinstance(launcher, str) else launcher
    if supervised:
        before = [sys.executable, LAUNCH, "supervise", "--max-restarts", "1000", "--", *before]
    command = [*before, LAUNCH, "serve", "--model", model, "--port", port, "--log-level", "warning", *after, *flags]
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL)
    try:
        _wait_ready(process, port)
        yield Served(process.pid, port)
    finally:
        process.terminate()
        process.wait()


def _wait_ready(process: subprocess.Popen, port: int) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")
