"""Programs that read a part of the output, such as ``head``: the command ends quietly, with the status of SIGPIPE."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from launchers import ROOT, environment

from labinfer.base.errors import ExitStatus

OUTPUT_CLOSED = 128 + signal.SIGPIPE
COMMANDS = {
    "summary": ["--help"],
    "long help": ["serve", "--help"],
    "table of a command without torch": ["cache"],
    "table": ["plan"],
    "answer": ["--prompt", "17 + 25 = ?", "--threads", "1"],
    "chat": ["chat", "--threads", "1"],
}
PLUGIN = """
import socket
from labinfer import register


@register("command", "prints", help="print a line")
def print_line(session):
    print("a line", flush=True)


@register("command", "sends", help="send to a peer that is gone")
def send(session):
    here, peer = socket.socketpair()
    peer.close()
    here.send(b"text")
"""


def run_unread(arguments: list[str]) -> subprocess.CompletedProcess:
    """Run a command whose standard output is a pipe without a reader."""
    command = [sys.executable, "-m", "labinfer", *arguments]
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        return subprocess.run(
            command,
            input="17 + 25 = ?\n",
            stdout=reader.stdin,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
            timeout=300,
        )


@pytest.mark.parametrize("name", COMMANDS)
def test_command_ends_quietly(name):
    done = run_unread(COMMANDS[name])
    assert done.returncode == OUTPUT_CLOSED == 141
    told = [line for line in done.stderr.splitlines() if "starting: " not in line and "compiling" not in line]
    assert told == []


@pytest.mark.parametrize(("command", "status"), [("prints", OUTPUT_CLOSED), ("sends", ExitStatus.INTERNAL)])
def test_only_a_closed_output_ends_a_command_quietly(command, status, tmp_path):
    """A broken connection to a peer is an error, also while nobody reads the output."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    done = run_unread([command, "--plugin", str(tmp_path / "plugin.py")])
    assert done.returncode == status
    assert ("BrokenPipeError" in done.stderr) == (command == "sends")


def test_job_ends_with_its_reader(tmp_path):
    """It runs no further lines: the second half of them would take minutes."""
    path = tmp_path / "in.jsonl"
    line = json.dumps({"prompt": "17 + 25 = ?", "max_tokens": 2, "ignore_eos": True})
    path.write_text(f"{line}\n" * 20_000)
    command = [sys.executable, "-m", "labinfer", "--input", str(path), "--threads", "1", "--log-level", "warning"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    )
    with process:
        assert json.loads(process.stdout.readline())["usage"]["completion_tokens"] == 2
        process.stdout.close()
        assert process.wait(60) == OUTPUT_CLOSED
        told = process.stderr.read()
    assert "error" not in told and "Traceback" not in told
