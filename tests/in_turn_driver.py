"""Runs on every rank of a real launch: one command after another, in the same processes.

``python in_turn_driver.py DIRECTORY`` takes lists of arguments from ``cases.json`` there. What rank R says in case N goes to
``N.R.out`` and ``N.R.err``, and the exit status that it comes to and the seconds it took to ``N.R.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import labinfer.commands.generate  # noqa: F401 - so that no case's seconds are those of imports
from labinfer.cli import main
from labinfer.spmd.environment import detect


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


def run_cases(directory: Path, rank: int) -> None:
    for number, arguments in enumerate(json.loads((directory / "cases.json").read_text())):
        begin = time.monotonic()
        with output_to(*(directory / f"{number}.{rank}.{suffix}" for suffix in ("out", "err"))):
            status = main(arguments)
        result = {"status": int(status), "seconds": time.monotonic() - begin}
        (directory / f"{number}.{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), detect().rank)
