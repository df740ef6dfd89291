"""StandardError: a stream to standard error whose writes never fail.

Text that cannot be written (full disk, closed pipe, closed descriptor) is dropped without an error. Everything that
this program writes to standard error goes through here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import TextIO

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
CLEAR_ROW = "\x1b[K"
"""Escape sequence that clears a terminal's row from the cursor on. Written before a log line, it removes a live progress line."""


class StandardError(io.TextIOBase):
    """Text stream on descriptor 2 whose writes never fail. Each ``write`` is one system call, so that the lines of
    several processes do not mix."""

    encoding, errors = "utf-8", "backslashreplace"

    def write(self, text: str) -> int:
        """Write ``text`` without buffering; text that cannot be written is lost."""
        self.write_bytes(text.encode(self.encoding, self.errors))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write encoded text without buffering; data that cannot be written is lost."""
        view = memoryview(data)
        with contextlib.suppress(OSError):
            while view:
                view = view[os.write(STANDARD_ERROR, view) :]

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STANDARD_ERROR

    def isatty(self) -> bool:
        return os.isatty(STANDARD_ERROR)


class StandardErrorHandler(logging.Handler):
    """Log handler that writes records to the current ``sys.stderr``, and never fails."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - a wrong call of ``logging`` ends no run, as with the handlers of ``logging``
            self.handleError(record)
        else:
            write_error(CLEAR_ROW * is_terminal() + text + "\n")


def write_error(text: str, stream: TextIO | None = None) -> None:
    """Write ``text`` to ``stream``, by default the current ``sys.stderr`` (a script or a notebook may have replaced
    it). Text that cannot be written is lost."""
    stream = sys.stderr if stream is None else stream
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # ValueError: the stream is closed; AttributeError: it is None
        stream.write(text)
        stream.flush()


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether ``stream``, by default ``sys.stderr``, is a terminal."""
    stream = sys.stderr if stream is None else stream
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):  # as in write_error
        return False


def terminal_columns(stream: TextIO | None = None) -> int:
    """Width in columns of the terminal behind ``stream``, by default ``sys.stderr``; 0 if it is not a terminal, or its
    width is unknown."""
    stream = sys.stderr if stream is None else stream
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):  # as in write_error
        return 0


def write_lines(text: str) -> None:
    """Write one or more whole lines to descriptor 2, without the lock of ``sys.stderr``, which a hung thread may hold."""
    StandardError().write(text.rstrip("\n") + "\n")


def protect_standard_streams() -> None:
    """Ensure that log messages neither fail nor end up in another file. Call it before any file is opened.

    If descriptor 0, 1 or 2 is closed, the next opened file gets its number, and log messages would be written into that
    file. Closed descriptors are opened on the null device. Standard output is opened read-only, so that writing results
    is an error, as with a closed descriptor.
    """
    for descriptor in (0, STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY if descriptor == STANDARD_ERROR else os.O_RDONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
    sys.stderr = StandardError()
