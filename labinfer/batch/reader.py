"""Input lines of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from labinfer.errors import UserError

STANDARD = "-"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlReader:
    """The numbered lines of a file, or of standard input for ``-``. Empty lines are passed over.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: str):
        self._path = path
        self._file: BinaryIO
        if path == STANDARD:
            self._file = sys.stdin.buffer
        else:
            if Path(path).is_dir():
                raise UserError(f"--input {path} is a directory; give a JSONL file")
            try:
                self._file = open(path, "rb")  # noqa: SIM115 - read until the job ends
            except OSError as error:
                raise UserError(f"cannot read --input {path}: {error.strerror}") from None

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for number, line in enumerate(self._file, start=1):
            line = line.removeprefix(BYTE_ORDER_MARK).strip()
            if line:
                yield number, line
