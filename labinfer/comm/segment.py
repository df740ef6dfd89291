"""Memory that processes of one machine share. It has no name in any file system, so nothing is left behind.

The first process makes an anonymous file (``memfd_create(2)``), the others open it through the first one's entry in
``/proc``, which only the same user may. When the last process has ended, however it ended, the memory is free.
"""

from __future__ import annotations

import mmap
import os
import secrets

import msgspec


class SegmentAddress(msgspec.Struct, frozen=True):
    """Where others of this machine find a segment, and what they must find there."""

    path: str
    target: str
    """What the path links to. On another machine the same path is something else."""
    size: int


def create_segment(size: int) -> tuple[mmap.mmap, int, SegmentAddress]:
    """``size`` zero bytes, the descriptor that keeps them findable until it is closed, and how to find them.

    Raises:
        OSError: this system has no such files, or no room.
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
    """Another process's segment.

    Raises:
        OSError: it is not on this machine, or not for this user.
    """
    if os.readlink(address.path) != address.target:
        raise FileNotFoundError(f"{address.path} is not {address.target} here")
    descriptor = os.open(address.path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, address.size)
    finally:
        os.close(descriptor)
