"""Anonymous shared memory between processes of one machine, which leaves nothing behind.

The first process makes an anonymous file (``memfd_create(2)``). The other processes open it through the first one's entry in
``/proc``, which requires the same user. The memory is freed when the last process ends, for whatever reason.
"""

from __future__ import annotations

import mmap
import os
import secrets

import msgspec


class SegmentAddress(msgspec.Struct, frozen=True):
    """Path at which other processes of the machine open a segment, and a check that it is the right segment."""

    path: str
    target: str
    """Target of the symbolic link ``path``. On another machine ``path`` is missing or has another target, so ``open_segment`` fails there."""
    size: int
    """Size of the segment in bytes."""


def create_segment(size: int) -> tuple[mmap.mmap, int, SegmentAddress]:
    """Make a segment of ``size`` zeroed bytes.

    Returns:
        The memory, a file descriptor (others can open the segment until it is closed), and the address.

    Raises:
        OSError: memfd is not supported, or memory is exhausted.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    descriptor = os.memfd_create(f"labinfer-{secrets.token_hex(16)}")
    try:
        os.ftruncate(descriptor, size)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return mmap.mmap(descriptor, size), descriptor, SegmentAddress(path, os.readlink(path), size)
    except OSError:
        os.close(descriptor)
        raise


def open_segment(address: SegmentAddress) -> mmap.mmap:
    """Map the segment of another process.

    Raises:
        OSError: the segment is on another machine, or belongs to another user.
    """
    if os.readlink(address.path) != address.target:
        raise FileNotFoundError(f"{address.path} is not {address.target} here")
    descriptor = os.open(address.path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, address.size)
    finally:
        os.close(descriptor)
