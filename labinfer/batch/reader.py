"""Input lines of a job."""

from __future__ import annotations

import os
import queue
import stat
import threading
from collections.abc import Iterator

from labinfer.errors import UserError
from labinfer.observe.output_file import STANDARD

STANDARD_INPUT = 0
MAX_LINES_AHEAD = 1024
CHUNK_BYTES = 1 << 16
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonlReader:
    """The numbered lines of a file, or of standard input for ``-``. Empty lines are passed over.

    A pipe may come slowly, from a program that waits for our answers before it asks on. So what is no regular file is
    read by a thread, and the iterator yields None where there is no line yet.

    Raises:
        UserError: the file cannot be opened; while iterating, that it cannot be read.
    """

    def __init__(self, path: str):
        self._path = path
        try:
            self._fd = STANDARD_INPUT if path == STANDARD else os.open(path, os.O_RDONLY)
            kind = os.fstat(self._fd).st_mode
        except OSError as error:
            raise self._refusal(error) from None
        if stat.S_ISDIR(kind):
            raise UserError(f"--input {path} is a directory; give a JSONL file")
        self._arrived: queue.Queue[bytes | OSError] | None = None
        if not stat.S_ISREG(kind):
            self._arrived = queue.Queue(MAX_LINES_AHEAD)
            threading.Thread(target=self._read_ahead, name="input", daemon=True).start()

    def __iter__(self) -> Iterator[tuple[int, bytes] | None]:
        number = 0
        try:
            for line in self._lines() if self._arrived is None else self._lines_so_far():
                if line is None:
                    yield None
                    continue
                number += 1
                line = line.removeprefix(BYTE_ORDER_MARK).strip()
                if line:
                    yield number, line
        except OSError as error:
            raise self._refusal(error) from None

    def _lines(self) -> Iterator[bytes]:
        """Lines with their line feed; by ``os.read``, whose thread may be left waiting when the process ends."""
        pieces: list[bytes] = []
        while chunk := os.read(self._fd, CHUNK_BYTES):
            *complete, rest = chunk.split(b"\n")
            for line in complete:
                yield b"".join([*pieces, line, b"\n"])
                pieces = []
            pieces.append(rest)
        if last := b"".join(pieces):
            yield last

    def _read_ahead(self) -> None:
        end: bytes | OSError = b""  # a line has at least its line feed
        try:
            for line in self._lines():
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
            yield line

    def _refusal(self, error: OSError) -> UserError:
        return UserError(f"cannot read --input {self._path}: {error.strerror}")
