"""Ranks that have imported all they need and wait for commands: many commands, one launch."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from launchers import ROOT, Finished, command, finish, kill_tree, start

from labinfer.base.errors import ExitStatus

SCRIPT = str(ROOT / "tests" / "waiting_ranks_driver.py")
END = "end"
"""File whose presence ends the ranks."""


class WaitingRanks:
    """One launch whose ranks run commands one after another, as they are asked.

    Args:
        directory: for what is asked and said; made where there is none.
        nodes: as ``command`` takes them.
    """

    def __init__(
        self, launcher: str, ranks: int, directory: Path, *, script: str = SCRIPT, nodes: Sequence[str] = (), **env: str
    ):
        directory.mkdir(exist_ok=True)
        self._directory, self._ranks, self._numbers = directory, ranks, itertools.count()
        arguments = command(launcher, ranks, script, str(directory), str(os.getpid()), nodes=nodes)
        self._process = start(arguments, **env)

    def run(self, *arguments, timeout: float = 120.0) -> Finished:
        """How a command ends that is given what follows ``launch.py``; all ranks come to the same status, which is checked."""
        number = next(self._numbers)
        unfinished = self._directory / "unfinished"
        unfinished.write_text(json.dumps(list(map(str, arguments))))
        unfinished.rename(self._directory / f"{number}.json")
        files = [self._directory / f"{number}.{rank}.json" for rank in range(self._ranks)]
        deadline = time.monotonic() + timeout
        while not all(file.exists() for file in files):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{arguments} ended the ranks, or takes too long\n{self._end_at_once(number)}")
            time.sleep(0.005)
        results = [json.loads(file.read_text()) for file in files]
        statuses = [result["status"] for result in results]
        if statuses[0] == ExitStatus.SOME_FAILED:  # lines of a job, of which only rank 0 knows
            statuses[0] = ExitStatus.OK
        assert len(set(statuses)) == 1, (arguments, results)
        seconds = max(result["seconds"] for result in results)
        out, err = (self._said(number, suffix) for suffix in ("out", "err"))
        return Finished(results[0]["status"], out, err, seconds, seconds)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Let the ranks end, in order."""
        (self._directory / END).touch()
        done = finish(self._process, 30)
        assert done.returncode == 0, done.text

    def _said(self, number: int, suffix: str) -> str:
        files = [self._directory / f"{number}.{rank}.{suffix}" for rank in range(self._ranks)]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def _end_at_once(self, number: int) -> str:
        kill_tree(self._process)
        return self._said(number, "out") + self._said(number, "err") + finish(self._process, 30).text


class SharedLaunches:
    """Ranks for whoever needs some, by launcher and number: a launch serves all who come."""

    def __init__(self, directory: Path):
        self._directory, self._numbers = directory, itertools.count()
        self._launches: dict[tuple[str, int], WaitingRanks] = {}

    def run(self, launcher: str, ranks: int, *arguments, timeout: float = 120.0) -> Finished:
        """As ``WaitingRanks.run``."""
        launch = self._launches.get((launcher, ranks))
        if launch is None or not launch.is_running:  # a command that failed may have ended it
            launch = WaitingRanks(launcher, ranks, self._directory / str(next(self._numbers)))
            self._launches[launcher, ranks] = launch
        return launch.run(*arguments, timeout=timeout)

    def end(self) -> None:
        with ExitStack() as stack:  # all of them, also if one fails
            for launch in self._launches.values():
                if launch.is_running:
                    stack.callback(launch.end)


def run_in_turn(
    launcher: str,
    ranks: int,
    cases: dict[str, list],
    directory: Path,
    *,
    timeout: float = 240,
    script: str = SCRIPT,
    nodes: Sequence[str] = (),
    **env: str,
) -> dict[str, Finished]:
    """How commands end, by name, that the ranks of a launch of their own are given one after another.

    Args:
        cases: what follows ``launch.py``, by a name for the case.
        directory: for what ranks say; made where there is none.
        nodes: as ``command`` takes them.
    """
    launch = WaitingRanks(launcher, ranks, directory, script=script, nodes=nodes, **env)
    try:
        return {name: launch.run(*arguments, timeout=timeout) for name, arguments in cases.items()}
    finally:
        if launch.is_running:
            launch.end()
