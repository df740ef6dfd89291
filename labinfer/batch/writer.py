"""Output lines of a job: each is written whole, as soon as its request is finished."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from labinfer.batch.reader import STANDARD
from labinfer.errors import UserError


class JsonlWriter:
    """Writes JSON lines to a file, or to standard output for ``-``.

    A line goes to the system in one write, unbuffered: a job that is killed leaves whole lines only. What the file held
    before is kept until ``begin``, so that a job that never starts destroys nothing.

    Raises:
        UserError: the file cannot be written, or is the input.
    """

    def __init__(self, path: str, input_path: str = ""):
        self._path = path
        if path == STANDARD:
            sys.stdout.flush()
            self._fd = sys.stdout.fileno()
            return
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            parent = Path(path).absolute().parent
            hint = f"; there is no directory {parent}" if not parent.is_dir() else ""
            raise UserError(f"cannot write --output {path}: {error.strerror}{hint}") from None
        if input_path not in ("", STANDARD) and os.path.samefile(path, input_path):
            raise UserError(f"--output {path} is the --input file; give another one")

    def begin(self) -> None:
        """Drop what an earlier run left in the file."""
        if self._path != STANDARD and os.path.isfile(self._path):  # not a pipe or /dev/null
            os.ftruncate(self._fd, 0)

    def write(self, record: dict[str, Any]) -> None:
        data = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                raise UserError(
                    f"cannot write --output {self._path}: {error.strerror}; the lines before this one are complete"
                ) from None

    def close(self) -> None:
        if self._path != STANDARD:
            os.close(self._fd)
