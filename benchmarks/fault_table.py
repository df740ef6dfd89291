"""kill -9 and SIGSTOP of every process of a run, in every state: how long until all have ended, and what was said.

    python benchmarks/fault_table.py --markdown faults.md
    python benchmarks/fault_table.py --launchers mpirun --commands serve --states decode --victims "rank 0"

Two ranks of the bundled model as a pipeline. A run ends well when no process of it is left, an error names
what died or stopped, and a job's output has whole lines only. A stopped launcher or supervisor holds nothing up: its run answers
for several fault timeouts, or ends as it was asked to, and all of it ends when who was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from threading import Thread

from process_tree import entries, is_gateway, is_rank, is_running, marked_processes, processes, rank_number
from served import LAUNCH, LAUNCHERS

COMMANDS = ("serve", "job")
STATES = ("loading", "prefill", "decode", "idle", "draining")
VICTIMS = ("rank 0", "rank 1", "gateway", "launcher", "supervisor")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
START_SECONDS = 20
"""``--timeout`` of the runs: a stop before the ranks have met is noticed then."""
LIMIT_SECONDS = 90.0
"""After which a run that has not ended counts as left behind; a gateway that was never heard has a minute more than others."""
UNDISTURBED_FACTOR = 3.0
"""Fault timeouts after which a run whose launcher or supervisor is stopped counts as one that goes on, if it answers."""
LONG_PROMPT = "word " * 400
NUM_LINES = 4000
"""Lines of a job, which is not to end by itself."""
ERRORS = (
    r"^labinfer: error: (.*)",
    r"^labinfer: (rank \d+ exited without a message.*)",
    r"(Killed \(signal 9\)|SIGKILL|failed \(exitcode: -9\).*)",
)
"""Lines that are looked for in what a run said, one kind after the other; the last is of launchers."""
BODIES = {
    "prefill": {"prompt": LONG_PROMPT, "max_tokens": 1},
    "decode": {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Fault to inject: a signal to a victim process in a state of the run."""

    launcher: str
    command: str
    state: str
    victim: str
    signum: signal.Signals

    @property
    def makes_sense(self) -> bool:
        """Jobs have no gateway and drain nothing."""
        return self.command == "serve" or (self.victim != "gateway" and self.state != "draining")

    @property
    def is_harmless(self) -> bool:
        """Whether the run survives: the stopped victim only waits for the other processes to end."""
        return self.victim in ("launcher", "supervisor") and self.signum == signal.SIGSTOP


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a trial: how the run ended after the fault."""

    seconds: float | None
    """From the signal to the end of the last process; None where some were left. Of a stopped launcher or supervisor: to the end
    of the ranks."""
    status: int | None
    """Exit status of the process that was started first; None where some were left."""
    said: str
    """The first error."""
    num_bad_lines: int = 0
    """Lines of the job's output that are not whole."""
    goes_on: bool = False
    """Whether the run was still answering, where a launcher or a supervisor was stopped."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=("mpirun", "torchrun"), default=("mpirun", "torchrun"))
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--signals", nargs="+", choices=[s.name for s in SIGNALS], default=[s.name for s in SIGNALS])
    parser.add_argument("--fault-timeout", type=float, default=6.0)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    axes = itertools.product(args.launchers, args.commands, args.victims, args.signals, args.states)
    lines = ["| launcher | command | state | fault | ended after | status | said |", "|---|---|---|---|---|---|---|"]
    for launcher, command, victim, name, state in axes:
        case = Case(launcher=launcher, command=command, state=state, victim=victim, signum=signal.Signals[name])
        if case.makes_sense:
            lines.append(row(case, try_out(case, args.fault_timeout)))
            print(lines[-1], flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def row(case: Case, outcome: Outcome) -> str:
    left = "goes on" if outcome.goes_on else "**left behind**"
    ended = left if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    bad = f"; **{outcome.num_bad_lines} half lines**" if outcome.num_bad_lines else ""
    fault = f"{case.signum.name} of {case.victim}"
    status = "–" if outcome.status is None else outcome.status
    return f"| {case.launcher} | {case.command} | {case.state} | {fault} | {ended} | {status} | {outcome.said}{bad} |"


def try_out(case: Case, fault_timeout: float) -> Outcome:
    """Start a run, bring it into the state, send the signal and look at what comes of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(case, folder, fault_timeout) as (process, port):
            reach(case, process.pid, port, folder)
            target = find(case.victim, process.pid)
            begin, size = time.monotonic(), output_size(folder)
            os.kill(target, case.signum)
            goes_on = False
            if case.is_harmless:
                least = UNDISTURBED_FACTOR * fault_timeout
                seconds, goes_on = watch_undisturbed(
                    target, mark(folder), begin, least, lambda: answers(case, port, folder, size)
                )
            else:
                seconds = wait_for_end(mark(folder), begin)
            status = None if seconds is None else process.wait()
        return Outcome(
            seconds=seconds,
            status=status,
            said=first_error(folder / "log"),
            num_bad_lines=count_bad_lines(folder / "out.jsonl"),
            goes_on=goes_on,
        )


@contextmanager
def started(case: Case, folder: Path, fault_timeout: float) -> Iterator[tuple[subprocess.Popen, int]]:
    """The launcher's process, and the server's port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before, after = LAUNCHERS[case.launcher]
    if case.victim == "supervisor":
        before = [sys.executable, LAUNCH, "supervise", "--", *before]
    if case.command == "serve":
        own = ["serve", "--port", port, "--drain-timeout", 30]
    else:
        own = ["--input", folder / "in.jsonl", "--output", folder / "out.jsonl"]
        write_input(case, folder / "in.jsonl")
    command = [*before, LAUNCH, *own, *after, "--fault-timeout", fault_timeout, "--timeout", START_SECONDS]
    command += ["--max-model-len", 2048]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        if case.command == "job" and case.state == "idle":  # so that the job waits for lines
            stack.callback(os.close, os.open(folder / "in.jsonl", os.O_RDWR))
        process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | dict([mark(folder).split("=")]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process, port
        finally:
            kill_all(marked_processes(mark(folder)))
            process.wait()


def mark(folder: Path) -> str:
    """A variable in the environment of all processes of a trial, by which they are found when nobody is above them any more."""
    return f"FAULT_TABLE_TRIAL={folder}"


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def write_input(case: Case, path: Path) -> None:
    """The job's prompts: a file, or a pipe to which nothing is written where it is to be idle."""
    if case.state == "idle":
        os.mkfifo(path)
    else:
        body = BODIES.get(case.state, BODIES["decode"])
        lines = (body | {"id": number, "prompt": f"{number} {body['prompt']}"} for number in range(NUM_LINES))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def reach(case: Case, ancestor: int, port: int, folder: Path) -> None:
    """Wait until the run is in the state."""
    until = time.monotonic() + LIMIT_SECONDS
    while len(ranks := processes(ancestor, is_rank)) < 2 or (
        case.victim == "gateway" and not processes(ancestor, is_gateway)
    ):
        assert time.monotonic() < until, "the ranks did not start"
        time.sleep(0.02)
    if case.state == "loading":
        time.sleep(0.5)
        return
    if case.command == "job":
        while "KV cache" not in (folder / "log").read_text():
            assert time.monotonic() < until and all(map(is_running, ranks)), (folder / "log").read_text()
            time.sleep(0.1)
        time.sleep(2.0)
        return
    while not is_ready(port):
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.1)
    if case.state != "idle":
        for _ in range(8):
            Thread(
                target=ask_always, args=(port, BODIES["prefill" if case.state == "prefill" else "decode"]), daemon=True
            ).start()
        time.sleep(1.0)
    if case.state == "draining":
        os.kill(ancestor, signal.SIGTERM)
        time.sleep(1.0)


def is_ready(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
        return True
    return False


def ask_always(port: int, body: dict) -> None:
    """One request after another until the server is gone."""
    while ask(port, body):
        pass


def ask(port: int, body: dict) -> bool:
    """Whether a request is answered."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
        answer.read()
        return True
    return False


def find(victim: str, launcher: int) -> int:
    """The process that is meant.

    Args:
        launcher: process id of whoever was started first, which is the supervisor where there is one.
    """
    if victim in ("launcher", "supervisor"):
        return launcher
    if victim == "gateway":
        return processes(launcher, is_gateway)[0]
    number = int(victim.split()[1])
    return next(pid for pid in processes(launcher, is_rank) if rank_number(pid) == number)


def wait_for_end(variable: str, begin: float) -> float | None:
    """Seconds until all with this in their environment have ended; None where some were still there at the limit, which are
    killed then."""
    while left := marked_processes(variable):
        if time.monotonic() > begin + LIMIT_SECONDS:
            kill_all(left)
            return None
        time.sleep(0.02)
    return time.monotonic() - begin


def watch_undisturbed(
    stopped: int, variable: str, begin: float, least: float, answers: Callable[[], bool]
) -> tuple[float | None, bool]:
    """Wait for the end, or a sign of life, of a run whose launcher or supervisor is stopped, and let that go on.

    Args:
        variable: in the environment of all its processes.
        least: seconds after which it counts as undisturbed, if it answers.

    Returns:
        seconds until the ranks had ended, None where they had not, or others of it did not end behind them; and whether it answered.
    """
    while any(is_rank(words) for pid in marked_processes(variable) if (words := entries(pid, "cmdline"))):
        if time.monotonic() > begin + least and answers():
            return None, True
        if time.monotonic() > begin + LIMIT_SECONDS:
            return None, False
        time.sleep(0.2)
    ended = time.monotonic() - begin
    os.kill(stopped, signal.SIGCONT)
    return (ended if wait_for_end(variable, time.monotonic()) is not None else None), False


def answers(case: Case, port: int, folder: Path, size: int) -> bool:
    """Whether a server answers, or a job has written more than these bytes; nothing more is to come of a server that drains."""
    if case.command == "serve":
        return case.state != "draining" and is_ready(port) and ask(port, BODIES["prefill"])
    if case.state == "idle":
        with (folder / "in.jsonl").open("wb", buffering=0) as pipe:
            pipe.write(json.dumps(BODIES["prefill"]).encode() + b"\n")
    return output_size(folder) > size


def output_size(folder: Path) -> int:
    path = folder / "out.jsonl"
    return path.stat().st_size if path.exists() else 0


def first_error(log: Path) -> str:
    """First error in a log: the engine's, else the launcher's."""
    text = log.read_text(errors="replace")
    for pattern in ERRORS:
        if match := re.search(pattern, text, re.MULTILINE):
            return match[1][:140].replace("|", "/")
    return "–"


def count_bad_lines(path: Path) -> int:
    """Lines that are not JSON."""
    bad = 0
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        try:
            json.loads(line)
            bad += not line.endswith("\n")
        except ValueError:
            bad += 1
    return bad


if __name__ == "__main__":
    sys.exit(main())
