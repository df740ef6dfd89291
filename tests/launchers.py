"""Start real launches from tests: alone, under torchrun, under mpirun; with a time limit that kills the whole tree."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from process_tree import descendants

ROOT = Path(__file__).parent.parent
LAUNCH = str(ROOT / "launch.py")
BIN = Path(sys.executable).parent
LAUNCHERS = ("mpirun", "torchrun")
FIRST_PORT, NUM_PORT_RANGES, PORTS_EACH = 20_000, 120, 100
COUNTER = itertools.count()


def matrix(*quick: tuple, over: list[tuple] = [()]) -> list:  # noqa: B006 - never changed
    """Parameters of a test: all of ``over`` under both launchers, the launcher first; those not in ``quick`` are slow."""
    cases = [(launcher, *rest) for launcher in LAUNCHERS for rest in over]
    assert set(quick) <= set(cases)
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


@dataclass
class Finished:
    """How a launch ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    """From the start to the end."""
    seconds_after_first_line: float
    """From its first line, which comes when modules are imported and the ranks have met, to the end."""

    @property
    def text(self) -> str:
        return self.stdout + self.stderr

    @property
    def our_errors(self) -> list[str]:
        """The error lines of the program, without what launchers add."""
        return error_lines(self.stderr)

    @property
    def own_stderr(self) -> str:
        """Standard error up to where torchrun begins its own account of the failure."""
        return without_torchrun(self.stderr)


def error_lines(text: str) -> list[str]:
    """The program's own lines that tell of an error."""
    return [line for line in text.splitlines() if line.startswith("labinfer: error:")]


def without_torchrun(text: str) -> str:
    """What comes before torchrun's own account of a failure."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if "torch/distributed/elastic" in line and "run.py" not in line:
            return "\n".join(lines[:index])
    return text


def command(launcher: str, ranks: int, script: str, *args: str, nodes: Sequence[str] = ()) -> list[str]:
    """The command line that starts ``script`` on ``ranks`` ranks.

    Args:
        nodes: name of the machine that each rank of mpirun takes this one for.
    """
    program = [script, *map(str, args)]
    if launcher == "single":
        assert ranks == 1
        return [sys.executable, *program]
    if launcher == "torchrun":
        # A port of its own for each launch: tests must not meet in one rendezvous.
        return [find_launcher("torchrun"), f"--nproc-per-node={ranks}", f"--master-port={free_port()}", *program]
    if launcher == "mpirun":
        if nodes:
            parts = (["-n", "1", "-env", "LABINFER_NODE_NAME", node, sys.executable, *program, ":"] for node in nodes)
            return [find_launcher("mpirun"), *itertools.chain(*parts)][:-1]
        return [find_launcher("mpirun"), "-n", str(ranks), sys.executable, *program]
    raise ValueError(launcher)


def find_launcher(name: str) -> str:
    """Path of a launcher: beside this interpreter, or on the PATH if this is an environment of ``tests/clients``."""
    return str(beside) if (beside := BIN / name).exists() else shutil.which(name) or str(beside)


def environment(**extra: str) -> dict[str, str]:
    """The tests' environment without what an outer launcher may have left in it."""
    left_over = ("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "TORCHELASTIC", "LABINFER_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    env = {key: value for key, value in os.environ.items() if not key.startswith(left_over) and key not in names}
    return env | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"} | extra


def start(arguments: list[str], **env: str) -> subprocess.Popen:
    """Start in a process group of its own, so that the whole tree can be ended."""
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float, begin: float | None = None) -> Finished:
    """Wait for a launch; past the limit the tree is killed and the test fails with what was printed."""
    begin = time.monotonic() if begin is None else begin
    outputs = [Output(process.stdout), Output(process.stderr)]
    try:
        process.wait(timeout)
        for output in outputs:
            output.join(max(0.0, begin + timeout - time.monotonic()))
        if any(output.is_alive() for output in outputs):
            raise subprocess.TimeoutExpired(process.args, timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        out, err = (output.read() for output in outputs)
        raise AssertionError(f"not done after {timeout:g} s: {process.args}\n{out}\n{err}") from None
    end = time.monotonic()
    out, err = (output.read() for output in outputs)
    first_line = min(output.first_line for output in outputs)
    return Finished(process.returncode, out, err, end - begin, end - min(first_line, end))


class Output(threading.Thread):
    """What comes out of a pipe, and when the first line of this program came."""

    def __init__(self, pipe: IO[str]):
        super().__init__(daemon=True)
        self._pipe, self._lines = pipe, []
        self.first_line = math.inf
        self.start()

    def run(self) -> None:
        for line in self._pipe:
            self._lines.append(line)
            if line.startswith("labinfer:") and not line.startswith("labinfer: starting"):
                self.first_line = min(self.first_line, time.monotonic())

    def read(self) -> str:
        """All of it, to the end of the pipe."""
        self.join()
        self._pipe.close()
        return "".join(self._lines)


def run(
    launcher: str, ranks: int, script: str, *args: str, timeout: float = 120, nodes: Sequence[str] = (), **env: str
) -> Finished:
    """Start and wait."""
    return finish(start(command(launcher, ranks, script, *args, nodes=nodes), **env), timeout)


def pipe(arguments: list[str], lines: str, **env: str) -> subprocess.CompletedProcess:
    """Run with these lines as standard input."""
    return subprocess.run(
        arguments, input=lines, capture_output=True, text=True, cwd=ROOT, env=environment(**env), timeout=120
    )


def kill_tree(process: subprocess.Popen) -> None:
    """End a launch and everything under it; torchrun's workers are sessions of their own, so children are looked up."""
    for pid in [*descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to connections.

    Test processes that run side by side count in ranges of their own, so that none takes what another is about to take.
    """
    while True:
        port = FIRST_PORT + os.getpid() % NUM_PORT_RANGES * PORTS_EACH + next(COUNTER) % PORTS_EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
