"""A private directory for as long as a run lasts, and the removal of those that killed runs have left."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labinfer.base.errors import UserError

PREFIX = "labinfer-run-"
YOUNG_SECONDS = 600.0
"""A directory without a lock may be one that has just been made."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory that only this user may enter. It is locked (``flock(2)``) until it is removed, or the process has ended.

    Raises:
        UserError: there is no place for one.
    """
    _remove_leftovers()
    try:
        directory = tempfile.TemporaryDirectory(prefix=PREFIX)
        lock = _lock(directory.name)
    except OSError as error:
        raise UserError(
            f"cannot make a directory for a local socket: {error}; set TMPDIR to another directory"
        ) from None
    with directory as name:
        try:
            yield Path(name)
        finally:
            os.close(lock)


def _remove_leftovers() -> None:
    """Remove what killed runs of this user have left: nobody has the lock any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody has it, or removes it as well
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG_SECONDS:
                continue
            lock = _lock(path)
            try:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
            finally:
                os.close(lock)


def _lock(path: str | Path) -> int:
    """The descriptor that keeps a directory locked.

    Raises:
        OSError: another one does.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
