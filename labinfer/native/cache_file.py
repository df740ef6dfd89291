"""Cache files: opened with ownership checks, sealed with a digest, replaced atomically, and locked while they are made.

A sealed file contains its content and a last line with the format, a digest of content and name, and the name under which it was
written. The name of a cache file encodes everything that its content depends on, so a file that was renamed, copied over another one,
truncated or damaged fails ``read_sealed``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

FORMAT = 1
"""Version of the format of the last line; part of the names of all sealed files, so that files of other versions are ignored."""
UNFINISHED, LOCK = ".unfinished", ".lock"
"""Suffixes of unfinished files, and of lock files."""
LARGEST = 256 << 20
"""Maximum size of a sealed file in bytes; libraries have about 2 MB, cost files about 10 KB."""
POLL_SECONDS = 0.1
"""Interval between two attempts to take a lock."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Damaged(Exception):
    """Cache file that cannot be trusted; the message says why."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Does not block if the path is a FIFO.

    Raises:
        FileNotFoundError: the path does not exist.
        Damaged: the path is not a regular file, or cannot be opened.
    """
    return _open(path, 0)


def open_own(path: Path) -> BinaryIO:
    """Open a regular file for reading that belongs to this user or root and that no other user may write to.

    Raises:
        FileNotFoundError: the path does not exist.
        Damaged: the path is a symbolic link, a FIFO, a directory or another user's file, or cannot be opened.
    """
    file = _open(path, os.O_NOFOLLOW)
    try:
        check_owner(os.fstat(file.fileno()))
    except Damaged:
        file.close()
        raise
    return file


def check_owner(status: os.stat_result) -> None:
    """Refuse a file that another user owns or may write to.

    Raises:
        Damaged: another user owns the file or may write to it.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise Damaged(f"it belongs to user {status.st_uid}")
    if status.st_mode & OTHERS_WRITE:
        raise Damaged("others may write to it")


def read_sealed(path: Path, open_file: Callable[[Path], BinaryIO] = open_own) -> bytes:
    """Content of a sealed file.

    Raises:
        FileNotFoundError: the path does not exist.
        Damaged: the content was not written under this name, or has changed.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST:
            raise Damaged(f"it has {size} bytes")
        try:
            data = file.read()
        except OSError as error:
            raise Damaged(f"it cannot be read: {error.strerror}") from None
    position = data.rfind(b"\nlabinfer ")
    if position < 0:
        raise Damaged("it has no digest")
    content, line = data[:position], data[position:]
    if line == _last_line(content, path.name):
        return content
    name = line.rstrip(b"\n").rpartition(b" ")[2].decode(errors="replace")
    if line == _last_line(content, name):
        raise Damaged(f"it was written as {name}")
    raise Damaged("its content does not match its digest")


def write_sealed(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a sealed file atomically; several processes may write it at once.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path, mode) as file:
        file.write(content)
        file.write(_last_line(content, path.name))


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """New file, which replaces ``path`` when the block ends without an error. Its data is then on the disk.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(UNFINISHED, f"{path.stem}-", path.parent)
    try:
        with open(descriptor, "wb") as file:
            try_lock(file)  # marks the file as being written, for processes that remove unfinished files
            yield file
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)  # otherwise the name might reach the disk before the content
            os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def try_lock(file: BinaryIO) -> bool:
    """Try to take the lock of an open file (``flock(2)``), which ends with the process. Returns whether this process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has the path ``path``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False


@contextlib.contextmanager
def locked(path: Path, seconds: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file during the block. The lock is released when the process ends, also by a signal.

    The block runs without the lock after ``seconds``, or if the file system has no locks, so it must be correct without the lock.

    Args:
        seconds: timeout of the wait for another process.
        on_wait: called once if another process holds the lock.
    """
    file = _take_lock(path, time.monotonic() + seconds, on_wait)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            file.close()


def _take_lock(path: Path, deadline: float, on_wait: Callable[[], None]) -> BinaryIO | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    waits = False
    while True:
        try:
            file = os.fdopen(os.open(path, flags, 0o600), "rb", 0)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if not waits:
                on_wait()
            waits = True
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
            continue
        except OSError:  # a file system without locks
            file.close()
            return None
        if is_at(file, path):
            return file
        file.close()  # the previous holder of the lock has just removed the file


def _open(path: Path, flags: int) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else f"it cannot be opened: {error.strerror}"
        raise Damaged(reason) from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise Damaged(f"it is a {'directory' if stat.S_ISDIR(kind) else 'FIFO or a device'}")
    return open(descriptor, "rb", buffering=0)


def _last_line(content: bytes, name: str) -> bytes:
    """Last line that seals ``content`` under ``name``."""
    digest = hashlib.blake2b(name.encode() + b"\0", digest_size=32)
    digest.update(content)
    return f"\nlabinfer {FORMAT} {digest.hexdigest()} {name}\n".encode()


def digest(*parts: object) -> str:
    """Short digest of the ``repr`` of some values."""
    return hashlib.blake2b(repr(parts).encode(errors="surrogateescape"), digest_size=12).hexdigest()
