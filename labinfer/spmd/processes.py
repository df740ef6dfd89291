"""Processes of this machine, as the kernel tells of them (Linux, ``proc(5)``)."""

from __future__ import annotations

import os
from pathlib import Path

STOPPED = "T"
RANK_NUMBERS = (b"RANK", b"PMI_RANK", b"OMPI_COMM_WORLD_RANK", b"SLURM_PROCID")
"""Variables in which launchers tell a process its number."""


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
    """Process ids of those that this process's launcher started as ranks, too, and that are stopped."""
    own = os.getppid()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _state_and_parent(pid) == (STOPPED, own) and _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    """Whether a process was started with a rank's number, and with this program: a shell's other jobs are none of ours."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        program = Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False
    return program and any(word.partition(b"=")[0] in RANK_NUMBERS for word in words)


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)
