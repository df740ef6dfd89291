"""Runs on every rank of a launch of ``waiting_ranks.py``: one command after another, in the same processes.

``python waiting_ranks_driver.py DIRECTORY PID`` takes lists of arguments from ``0.json``, ``1.json`` and so on there, as they
come, until there is a file ``end`` or the process PID is gone. What rank R says in case N goes to ``N.R.out`` and ``N.R.err``,
and the exit status that it comes to and the seconds it took to ``N.R.json``.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plugin_state import forget_plugins

import labinfer.cli.commands.generate  # noqa: F401 - so that no case's seconds are those of imports
from labinfer.base.plugins import PLUGINS
from labinfer.cli.main import main
from labinfer.comm.spmd.environment import detect

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.01, 0.2


@contextmanager
def output_to(*paths: Path) -> Iterator[None]:
    """Standard output and error of this process, whoever writes to them, in these two files."""
    kept = [os.dup(1), os.dup(2)]
    for stream, path in zip((1, 2), paths, strict=True):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)


def commands(directory: Path, asker: int) -> Iterator[list[str]]:
    for number in itertools.count():
        file, begin = directory / f"{number}.json", time.monotonic()
        while not file.exists():
            if (directory / "end").exists() or not Path(f"/proc/{asker}").exists():
                return
            waited = time.monotonic() - begin  # many ranks wait for minutes, and looking takes time of a core
            time.sleep(min(max(POLL_SECONDS, waited / 20), LONGEST_POLL_SECONDS))
        yield json.loads(file.read_text())


def run_commands(directory: Path, asker: int, rank: int) -> None:
    cpus = os.sched_getaffinity(0)
    for number, arguments in enumerate(commands(directory, asker)):
        begin = time.monotonic()
        with output_to(*(directory / f"{number}.{rank}.{suffix}" for suffix in ("out", "err"))):
            status = main(arguments)
        os.sched_setaffinity(0, cpus)  # what a process of its own would leave to the next one
        gc.unfreeze()
        forget_plugins(PLUGINS)
        unfinished, file = directory / f"{number}.{rank}.unfinished", directory / f"{number}.{rank}.json"
        unfinished.write_text(json.dumps({"status": int(status), "seconds": time.monotonic() - begin}))
        unfinished.rename(file)


if __name__ == "__main__":
    run_commands(Path(sys.argv[1]), int(sys.argv[2]), detect().rank)
