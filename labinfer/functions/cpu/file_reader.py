"""``FileReader``: parts of a file on their way into memory."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import IO

import torch

from labinfer.functions.cpu.library import Library

NUM_THREADS = 4
"""A disk is the fastest with several reads under way."""
PIECE_BYTES = 1 << 20
"""Bytes of one read; a longer part is read by several threads."""
BLOCK_BYTES = 4096
"""Parts begin at multiples of it, in the file and in memory, and are as long: what reading past the page cache asks for."""
FILE_ENDS = -1
"""See ``file_reader.cpp``."""


class FileReader:
    """Threads that read parts of a file into slots of memory, until this object goes. They read past the page cache, as far as
    the file system can do that.

    Args:
        file: empty as yet.
        slots_SB: uint8, whole blocks.
    """

    def __init__(self, library: Library, file: IO[bytes], slots_SB: torch.Tensor):
        self._library = library
        self._begin, self._size = slots_SB.data_ptr(), slots_SB.shape[1]
        self._file = _reopen_direct(file)
        self._reader = library.reader_open(self._file.fileno(), len(slots_SB), NUM_THREADS)
        weakref.finalize(self, _close, library, self._reader, self._file, slots_SB)

    def read(self, slot: int, position: int) -> None:
        """Begin to read into a slot, which is written to until ``finish``."""
        dest = self._begin + slot * self._size
        self._library.reader_add(self._reader, slot, position, dest, self._size, PIECE_BYTES)

    def finish(self, slot: int) -> None:
        """Wait until a slot is read.

        Raises:
            OSError: it cannot be.
            EOFError: the file has ended.
        """
        error = self._library.reader_wait(self._reader, slot)
        if error == FILE_ENDS:
            raise EOFError
        if error:
            raise OSError(error, os.strerror(error))


def _reopen_direct(file: IO[bytes]) -> IO[bytes]:
    """An empty file once more, to be read past the page cache; the same where there is no such thing."""
    if not hasattr(os, "O_DIRECT"):
        return file
    try:
        direct = os.fdopen(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT), "rb", buffering=0)
    except OSError:
        return file
    os.pwrite(file.fileno(), bytes(BLOCK_BYTES), 0)
    with mmap.mmap(-1, BLOCK_BYTES) as block:  # some file systems take the flag, and then refuse to read
        try:
            os.preadv(direct.fileno(), [block], 0)
        except OSError:
            direct.close()
            direct = file
    os.ftruncate(file.fileno(), 0)
    return direct


def _close(library: Library, reader: int, *used: object) -> None:
    """End the threads. What they write to is kept alive until then."""
    library.reader_close(reader)
