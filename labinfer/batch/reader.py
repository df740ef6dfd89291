"""Input lines of a job."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from labinfer.errors import UserError

STANDARD = "-"
MAX_LINES_AHEAD = 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlReader:
    """The numbered lines of a file, or of standard input for ``-``. Empty lines are passed over.

    Standard input may come slowly, from a program that waits for our answers before it asks on. So it is read by a
    thread, and the iterator yields None where there is no line yet.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: str):
        self._file: BinaryIO
        self._arrived: queue.Queue[bytes] | None = None
        if path == STANDARD:
            self._file = sys.stdin.buffer
            self._arrived = queue.Queue(MAX_LINES_AHEAD)
            threading.Thread(target=self._read_ahead, name="stdin", daemon=True).start()
            return
        if Path(path).is_dir():
            raise UserError(f"--input {path} is a directory; give a JSONL file")
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - read until the job ends
        except OSError as error:
            raise UserError(f"cannot read --input {path}: {error.strerror}") from None

    def __iter__(self) -> Iterator[tuple[int, bytes] | None]:
        number = 0
        for line in self._file if self._arrived is None else self._lines_so_far():
            if line is None:
                yield None
                continue
            number += 1
            line = line.removeprefix(BYTE_ORDER_MARK).strip()
            if line:
                yield number, line

    def _read_ahead(self) -> None:
        for line in self._file:
            self._arrived.put(line)
        self._arrived.put(b"")  # a line has at least its line feed: this is the end

    def _lines_so_far(self) -> Iterator[bytes | None]:
        while True:
            try:
                line = self._arrived.get_nowait()
            except queue.Empty:
                yield None
                continue
            if not line:
                return
            yield line
