"""Pages of memory: large ones take a fault each where small ones take hundreds, and more of them fit the processor's tables."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

HUGE = 2 << 20
"""Bytes of a large page where it is smallest; less memory than this has none."""


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for large pages before memory is first written; no effect where the system has none (``madvise(2)``)."""
    madvise, advice = getattr(ctypes.CDLL(None), "madvise", None), getattr(mmap, "MADV_HUGEPAGE", None)
    if num_bytes < HUGE or madvise is None or advice is None:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), ctypes.c_int(advice))


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
        lines = smaps.read_text(errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, *fields = line.split(maxsplit=2)
        if not name.endswith(":"):
            is_inside = name.startswith(begin)
        elif is_inside and name in ("FilePmdMapped:", "ShmemPmdMapped:"):
            total += int(fields[0]) * 1024
    return total
