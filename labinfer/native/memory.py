"""Pages of memory: large ones take a fault each where small ones take hundreds, and more of them fit the processor's tables."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import BinaryIO

POPULATE_READ = 22
"""``MADV_POPULATE_READ`` of Linux 5.14 and later, which Python's ``mmap`` does not name."""
HUGE = 2 << 20
"""Bytes of a large page where it is smallest; less memory than this has none."""


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for large pages before memory is first written; no effect where the system has none (``madvise(2)``)."""
    if num_bytes >= HUGE:
        _advise(address, num_bytes, getattr(mmap, "MADV_HUGEPAGE", None))


def read_mapped(file: BinaryIO) -> bool:
    """Bring a file into the system's cache, into large pages where it has them, without Python's lock; false where it cannot."""
    size = os.fstat(file.fileno()).st_size
    with mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        first = ctypes.c_char.from_buffer(memory)  # which is why it is mapped for writing
        address = ctypes.addressof(first)
        use_huge_pages(address, size)
        done = _advise(address, size, POPULATE_READ)
        del first
    return done


def _advise(address: int, num_bytes: int, advice: int | None) -> bool:
    """``madvise(2)``; false where the system does not know this advice."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or advice is None:
        return False
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return not madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), ctypes.c_int(advice))


def has_huge_pages(switch: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> bool:
    """Whether the system gives large pages to memory for which they are asked for."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False


def huge_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Bytes in large pages of the mapped file that begins at an address (``proc_pid_smaps(5)``)."""
    begin, total, is_inside = f"{address:08x}-", 0, False
    try:
        with open(smaps, errors="replace") as lines:  # as far as it goes: the system counts pages while it is read
            for line in lines:
                name, *fields = line.split(maxsplit=2)
                if not name.endswith(":"):
                    if is_inside:
                        break
                    is_inside = name.startswith(begin)
                elif is_inside and name in ("FilePmdMapped:", "ShmemPmdMapped:"):
                    total += int(fields[0]) * 1024
    except OSError:
        return 0
    return total
