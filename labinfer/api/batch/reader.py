"""JsonlReader: reads the lines of a job's input, and counts them."""

from __future__ import annotations

import os
import queue
import re
import stat
import threading
from collections.abc import Iterator
from typing import NamedTuple

from labinfer.base.errors import UserError
from labinfer.observe.output_file import STANDARD

STANDARD_INPUT = 0
MAX_LINES_AHEAD = 1024
MAX_BYTES_AHEAD = 1 << 26
"""Maximum number of lines that are read ahead of the job, and maximum of their bytes; a single line may have more bytes."""
CHUNK_BYTES = 1 << 16
LINE = re.compile(rb"[^\n]*\n|[^\n]+")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LongLine(NamedTuple):
    """Length of an input line that is longer than allowed; its text is not kept."""

    num_bytes: int


class JsonlReader:
    """Reads numbered lines from a file, or from standard input for ``-``. Empty lines are skipped.

    A pipe may be fed by a program that waits for answers before it sends more. Therefore a thread reads any input that is not a
    regular file, and the iterator yields None if no line is available yet.

    Args:
        max_line_bytes: maximum length of a line, including its line feed.

    Raises:
        UserError: the file cannot be opened. If the open file cannot be read, the iteration raises the error.
    """

    def __init__(self, path: str, max_line_bytes: int):
        self._path, self._max_line_bytes = path, max_line_bytes
        try:
            self._fd = STANDARD_INPUT if path == STANDARD else os.open(path, os.O_RDONLY)
            kind = os.fstat(self._fd).st_mode
        except OSError as error:
            raise self._refusal(error) from None
        if stat.S_ISDIR(kind):
            raise UserError(f"--input {path} is a directory; give a JSONL file")
        self._arrived: queue.Queue[bytes | LongLine | OSError] | None = None
        self._num_bytes_ahead = 0
        self._has_room = threading.Condition()
        if not stat.S_ISREG(kind):
            self._arrived = queue.Queue(MAX_LINES_AHEAD)
            threading.Thread(target=self._read_ahead, name="input", daemon=True).start()

    def __iter__(self) -> Iterator[tuple[int, bytes | LongLine] | None]:
        number = 0
        try:
            for line in self._lines() if self._arrived is None else self._lines_so_far():
                if line is None:
                    yield None
                    continue
                number += 1
                if isinstance(line, LongLine):
                    yield number, line
                    continue
                line = line.removeprefix(BYTE_ORDER_MARK).strip()
                if line:
                    yield number, line
        except OSError as error:
            raise self._refusal(error) from None

    def close(self) -> None:
        """Close the input if it is a regular file. A pipe remains open, as the thread that reads it may be blocked."""
        if self._arrived is None and self._fd != STANDARD_INPUT:
            os.close(self._fd)

    def _lines(self) -> Iterator[bytes | LongLine]:
        """Yield lines with their line feeds. Reads by ``os.read``, so that a thread that is blocked in a read does not prevent the
        exit of the process."""
        line, length = bytearray(), 0  # the incomplete last line; its text is dropped once it is too long
        while chunk := os.read(self._fd, CHUNK_BYTES):
            for piece in LINE.findall(chunk):
                length += len(piece)
                if length <= self._max_line_bytes:
                    line += piece
                else:
                    line.clear()
                if piece.endswith(b"\n"):
                    yield bytes(line) or LongLine(length)
                    line, length = bytearray(), 0
        if length:
            yield bytes(line) or LongLine(length)

    def _read_ahead(self) -> None:
        end: bytes | OSError = b""  # empty at the end of the input: a line has at least its line feed
        try:
            for line in self._lines():
                with self._has_room:
                    self._has_room.wait_for(lambda: self._num_bytes_ahead < MAX_BYTES_AHEAD)
                    self._num_bytes_ahead += _num_bytes(line)
                self._arrived.put(line)
        except OSError as error:
            end = error
        finally:
            self._arrived.put(end)

    def _lines_so_far(self) -> Iterator[bytes | None]:
        while True:
            try:
                line = self._arrived.get_nowait()
            except queue.Empty:
                yield None
                continue
            if isinstance(line, OSError):
                raise line
            if not line:
                return
            with self._has_room:
                self._num_bytes_ahead -= _num_bytes(line)
                self._has_room.notify()
            yield line

    def _refusal(self, error: OSError) -> UserError:
        return UserError(f"cannot read --input {self._path}: {error.strerror}")


def check_input(path: str) -> None:
    """Check that an input file exists, without opening it.

    Args:
        path: value of ``--input``.

    Raises:
        UserError: the file is missing, or its directory may not be read.
    """
    if path in ("", STANDARD):
        return
    try:
        os.stat(path)
    except OSError as error:
        raise UserError(f"cannot read --input {path}: {error.strerror}") from None


def _num_bytes(line: bytes | LongLine) -> int:
    return len(line) if isinstance(line, bytes) else 0
