"""Processes of this machine, as the kernel tells of them (Linux, ``proc(5)``)."""

from __future__ import annotations

import os
from pathlib import Path

STOPPED = "T"


def pid_space() -> str:
    """Name of this machine's, or this container's, set of process ids; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return _state_and_parent(pid)[0] == STOPPED


def stopped_siblings() -> list[int]:
    """Process ids of those that this process's launcher started, too, and that are stopped."""
    own = os.getppid()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _state_and_parent(pid) == (STOPPED, own)]


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)
