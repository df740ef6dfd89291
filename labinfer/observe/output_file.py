"""OutputFile: a file, or standard output, to which whole lines are written without a buffer."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

from labinfer.base.errors import Interrupted, UserError
from labinfer.base.standard_error import write_error

STANDARD = "-"
STANDARD_OUTPUT = 1


class OutputFile:
    """A file to write to, or standard output for ``-``.

    Writes are unbuffered: a killed process leaves only whole lines. The earlier content of the file is kept until ``begin``, so
    that a job that fails to start destroys nothing.

    Args:
        flag: name of the option that gives ``path``, for error messages.
        others: maps the option of each other file of the run to its path; ``path`` must not be one of them.

    Raises:
        UserError: the file cannot be written, or is one of ``others``.
    """

    def __init__(self, path: str, flag: str = "--output", others: dict[str, str] | None = None):
        self._name = "standard output" if path == STANDARD else f"{flag} {path}"
        try:
            self._fd = STANDARD_OUTPUT
            if path == STANDARD and sys.stdout is not None:
                sys.stdout.flush()  # text printed before must come first
            if path != STANDARD:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode) and path != STANDARD
        except OSError as error:
            parent = Path(path).absolute().parent
            missing = path != STANDARD and not os.path.isdir(parent)  # does not raise
            hint = f"; directory {parent} does not exist" if missing else ""
            raise UserError(f"cannot write {self._name}: {error.strerror}{hint}") from None
        for other_flag, other in (others or {}).items():
            if (
                self._is_regular
                and other not in ("", STANDARD)
                and os.path.exists(other)
                and os.path.samefile(path, other)
            ):
                raise UserError(f"{flag} {path} is the {other_flag} file; give another one")

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self._fd)

    def begin(self) -> None:
        """Discard the earlier content of the file."""
        self.cut(0)

    def cut(self, num_bytes: int) -> None:
        """Truncate a regular file to ``num_bytes``."""
        if self._is_regular:
            os.ftruncate(self._fd, num_bytes)

    def close(self) -> None:
        """Close the file, unless it is standard output."""
        if self._fd != STANDARD_OUTPUT:
            os.close(self._fd)

    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._fd).st_size

    def write(self, text: str) -> None:
        """Write all of ``text``. If the write fails, a regular file is cut to its previous length.

        Raises:
            Interrupted: the reader of standard output, such as ``head``, has closed it (other programs get SIGPIPE then).
            UserError: the text could not be written.
        """
        view = memoryview(text.encode("utf-8", errors="replace"))
        before = self.num_bytes()
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                if isinstance(error, BrokenPipeError) and self._fd == STANDARD_OUTPUT:
                    raise Interrupted(signal.SIGPIPE) from None
                if self._is_regular:
                    os.ftruncate(self._fd, before)
                raise UserError(
                    f"cannot write {self._name}: {error.strerror}; everything written before is complete"
                ) from None

    def write_json(self, record: dict[str, Any]) -> None:
        """Write ``record`` as one line of JSON.

        Raises:
            UserError: the line could not be written.
        """
        self.write(json.dumps(record, ensure_ascii=False) + "\n")


def tell_written(*paths: str) -> None:
    """Log the names of the files that were written, one line each.

    Args:
        paths: values of options that name files. Empty values (option not given) and ``-`` (standard output) are
            skipped.
    """
    for path in paths:
        if path not in ("", STANDARD):
            write_error(f"labinfer: wrote {path}\n")
