"""``FileReader``: asynchronous reads of ranges of a file into memory."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import IO

import torch

from labinfer.functions.cpu.library import Library

NUM_THREADS = 4
"""Number of reading threads: disks are fastest with several reads in flight."""
PIECE_BYTES = 1 << 20
"""Size of one read in bytes; a slot's range of the file is split into such reads, among the threads."""
BLOCK_BYTES = 4096
"""Alignment in bytes of a range in the file and in memory, and of its length, as direct I/O requires."""
FILE_ENDS = -1
"""Error code of ``file_reader.cpp`` for the end of the file."""


class FileReader:
    """Threads that read ranges of a file into slots of memory, for the lifetime of this object. They use direct I/O (no page cache) if
    the file system supports it.

    Args:
        file: file to read; still empty, as it is reopened with direct I/O.
        slots_SB: uint8; a slot is a multiple of ``BLOCK_BYTES``.
    """

    def __init__(self, library: Library, file: IO[bytes], slots_SB: torch.Tensor):
        self._library = library
        self._begin, self._size = slots_SB.data_ptr(), slots_SB.shape[1]
        self._file = _reopen_direct(file)
        self._reader = library.reader_open(self._file.fileno(), len(slots_SB), NUM_THREADS)
        weakref.finalize(self, _close, library, self._reader, self._file, slots_SB)

    def read(self, slot: int, position: int) -> None:
        """Start filling ``slot`` with the bytes of the file from ``position`` on. Threads write to the slot until ``finish`` returns."""
        dest = self._begin + slot * self._size
        self._library.reader_add(self._reader, slot, position, dest, self._size, PIECE_BYTES)

    def finish(self, slot: int) -> None:
        """Wait until a slot's read has completed.

        Raises:
            OSError: the read failed.
            EOFError: the file has ended.
        """
        error = self._library.reader_wait(self._reader, slot)
        if error == FILE_ENDS:
            raise EOFError
        if error:
            raise OSError(error, os.strerror(error))


def _reopen_direct(file: IO[bytes]) -> IO[bytes]:
    """Reopen an empty file with direct I/O; returns ``file`` itself if that is not supported."""
    if not hasattr(os, "O_DIRECT"):
        return file
    try:
        direct = os.fdopen(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT), "rb", buffering=0)
    except OSError:
        return file
    os.pwrite(file.fileno(), bytes(BLOCK_BYTES), 0)
    with mmap.mmap(-1, BLOCK_BYTES) as block:  # some file systems accept O_DIRECT, but fail at the first read
        try:
            os.preadv(direct.fileno(), [block], 0)
        except OSError:
            direct.close()
            direct = file
    os.ftruncate(file.fileno(), 0)
    return direct


def _close(library: Library, reader: int, *used: object) -> None:
    """Stop the threads. The finalizer keeps the threads' file and slots alive until then."""
    library.reader_close(reader)
