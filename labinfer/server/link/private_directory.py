"""private_directory: temporary directory of a run, for this user only. Also removes directories of killed runs."""

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
"""Minimum age in seconds of a directory that is removed as a leftover: a younger directory without a lock may just have been
created."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """A temporary directory that only this user may enter. It is locked (``flock(2)``) until it is removed or the process has ended.

    Raises:
        UserError: the directory cannot be created.
    """
    _remove_leftovers()
    try:
        directory = tempfile.TemporaryDirectory(prefix=PREFIX)
        lock = _lock(directory.name)
    except OSError as error:
        raise UserError(
            f"cannot create a directory for a local socket: {error}; set TMPDIR to another directory"
        ) from None
    with directory as name:
        try:
            yield Path(name)
        finally:
            os.close(lock)


def _remove_leftovers() -> None:
    """Remove the directories of killed runs of this user, which are no longer locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, or another process removes it
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
    """Lock a directory; returns the file descriptor that holds the lock.

    Raises:
        OSError: the directory is locked already.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
