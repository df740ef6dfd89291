"""Huge pages: requests for memory in huge pages, and the number of bytes in them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import BinaryIO

POPULATE_READ = 22
"""``MADV_POPULATE_READ`` of Linux 5.14 and later, which Python's ``mmap`` does not define."""
HUGE_PAGE_BYTES = 2 << 20
"""Size of a huge page in bytes. Huge pages are not requested for memory that is smaller than one."""


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Request huge pages for memory before its first write; no effect if the system has none (``madvise(2)``)."""
    if num_bytes >= HUGE_PAGE_BYTES:
        _advise(address, num_bytes, getattr(mmap, "MADV_HUGEPAGE", None))


def read_mapped(file: BinaryIO) -> bool:
    """Read a file into the page cache without the GIL, as huge pages if the file system supports it. Returns False if
    Linux has no ``MADV_POPULATE_READ`` (before 5.14)."""
    size = os.fstat(file.fileno()).st_size
    with mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        first = ctypes.c_char.from_buffer(memory)  # from_buffer requires a writable mapping
        address = ctypes.addressof(first)
        use_huge_pages(address, size)
        done = _advise(address, size, POPULATE_READ)
        del first
    return done


def _advise(address: int, num_bytes: int, advice: int | None) -> bool:
    """Call ``madvise(2)``. Returns False if the system does not support the advice."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or advice is None:
        return False
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return not madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), ctypes.c_int(advice))


def has_huge_pages(switch: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> bool:
    """Whether the system has transparent huge pages, at least for memory that requests them."""
    try:
        return "[never]" not in switch.read_text()
    except OSError:
        return False


def huge_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Bytes of the mapped file at ``address`` that are in huge pages (``proc_pid_smaps(5)``)."""
    begin, total, is_inside = f"{address:08x}-", 0, False
    try:
        with open(
            smaps, errors="replace"
        ) as lines:  # read only as far as needed: the system counts pages during the read
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
