"""Try an installed LABInfer: an answer, a job on two ranks and a server, in an empty folder and with an empty home.

    python tools/smoke_test.py ENVIRONMENT

``ENVIRONMENT`` is a virtual environment with LABInfer and its extra ``mpi``. Needs no package, and no network but the loopback device.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

QUESTION, ANSWER = "17 + 25 = ?", "42"
ENDED_BY_SIGTERM = 143
"""Exit status of a server that has drained its requests after SIGTERM, as a shell gives it."""
LIMIT_SECONDS = 900
"""Limit of each step. Without compiled functions the first start compiles them, for minutes on a slow machine."""
DIRECT = build_opener(ProxyHandler({}))
"""Opens URLs of this machine, whatever proxy the environment names."""


def run(bin: Path, folder: Path, *command: str) -> str:
    """Standard output of a command of the environment.

    Raises:
        SystemExit: the command failed.
    """
    done = subprocess.run(
        [str(bin / command[0]), *command[1:]],
        cwd=folder,
        env=variables(bin, folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def variables(bin: Path, home: Path) -> dict[str, str]:
    """Environment variables of a user who has nothing but this environment. TMPDIR stays, as ``home`` is below it."""
    kept = {name: os.environ[name] for name in ("TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
    return kept | {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}


def try_prompt(bin: Path, folder: Path) -> None:
    expect("an answer", run(bin, folder, "labinfer", "--prompt", QUESTION, "--temperature", "0"), ANSWER)


def try_ranks(bin: Path, folder: Path) -> None:
    """A job on two pipeline stages under mpirun."""
    (folder / "in.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    )
    job = ("--input", "in.jsonl", "--output", "out.jsonl", "--log-level", "warning")
    run(bin, folder, "mpirun", "-n", "2", str(bin / "labinfer"), "-pp", "2", *job)
    (line,) = (folder / "out.jsonl").read_text().splitlines()
    expect("a job on two ranks", line, ANSWER)


def try_server(bin: Path, folder: Path) -> None:
    """A server answers a chat request and ends in order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(bin / "labinfer"), "serve", "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, cwd=folder, env=variables(bin, folder), start_new_session=True)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/ready")
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 8}
        with DIRECT.open(chat_request(port, body), timeout=60) as reply:
            expect("a server", json.load(reply)["choices"][0]["message"]["content"], ANSWER)
        server.terminate()
        if (status := server.wait(60)) != ENDED_BY_SIGTERM:
            raise SystemExit(f"the server ended with {status} after SIGTERM, not with {ENDED_BY_SIGTERM}")
    finally:
        server.kill()
        server.wait()


def chat_request(port: int, body: dict) -> Request:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


def wait_until_ready(server: subprocess.Popen, url: str) -> None:
    """Wait until ``url`` answers 200.

    Raises:
        SystemExit: the server ended, or is not ready in time.
    """
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with DIRECT.open(url, timeout=5):
                return
        except OSError:  # refused, or 503
            time.sleep(0.2)
    raise SystemExit(f"the server is not ready; its exit status is {server.poll()}")


def expect(what: str, text: str, answer: str) -> None:
    if answer not in text:
        raise SystemExit(f"{what}: {answer} is not in {text!r}")
    print(f"{what}: ok", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path)
    bin = parser.parse_args().environment.absolute() / "bin"
    with tempfile.TemporaryDirectory() as directory:
        print(run(bin, Path(directory), "labinfer", "--version").strip(), flush=True)
        for step in (try_prompt, try_ranks, try_server):
            step(bin, Path(directory))


if __name__ == "__main__":
    main()
