"""Pages of memory: large ones take a fault each where small ones take hundreds, and more of them fit the processor's tables."""

from __future__ import annotations

import ctypes
import mmap

HUGE = 2 << 20
"""Bytes of a large page where it is smallest; less memory than this has none."""


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for large pages before memory is first written; no effect where the system has none (``madvise(2)``)."""
    madvise, advice = getattr(ctypes.CDLL(None), "madvise", None), getattr(mmap, "MADV_HUGEPAGE", None)
    if num_bytes < HUGE or madvise is None or advice is None:
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + num_bytes - begin), ctypes.c_int(advice))
