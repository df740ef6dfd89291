"""Processes of this machine, from ``/proc`` (Linux, ``proc(5)``)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Container
from pathlib import Path

STOPPED = "T"
START_TIME = 19
"""Index of the start time among the fields after the name in ``/proc/PID/stat``."""
MPI_LAUNCHERS = ("hydra_pmi_proxy", "slurmstepd", "mpirun", "mpiexec", "mpiexec.hydra")
"""Programs that start ranks with MPICH. On machines other than the first, only the first two run."""
RANK_NUMBERS = (b"RANK", b"PMI_RANK", b"OMPI_COMM_WORLD_RANK", b"SLURM_PROCID")
"""Environment variables in which launchers pass the rank."""


def pid_space() -> str:
    """Identifier of this machine's or container's PID namespace; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def stopped_siblings() -> list[int]:
    """Process ids of stopped ranks that have the same launcher as this process."""
    own = os.getppid()
    return [pid for pid in _all() if _state_and_parent(pid) == (STOPPED, own) and _is_rank(pid)]


def stopped_ancestor() -> int:
    """Process id of the nearest stopped ancestor of this process; 0 if none."""
    pid = os.getppid()
    while pid > 1:
        state, parent = _state_and_parent(pid)
        if state == STOPPED:
            return pid
        pid = parent
    return 0


def ancestor(names: Container[str]) -> int:
    """Process id of the nearest ancestor whose program name is in ``names``; 0 if none."""
    pid = os.getppid()
    while pid > 1 and _read(pid, "comm").strip() not in names:
        pid = _state_and_parent(pid)[1]
    return pid if pid > 1 else 0


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of a process, parents before children."""
    parents = {each: _state_and_parent(each)[1] for each in _all()}
    below = [pid]
    for above in below:
        below += [each for each, parent in parents.items() if parent == above]
    return below[1:]


def start_time(pid: int) -> str:
    """Start time of a process, which distinguishes it from a later process with its id; empty if it has ended."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return fields[START_TIME] if fields else ""


def mpi_launcher_began() -> float:
    """Start time of this process's MPI launcher, or of the launcher's daemon on this machine, in seconds since 1970; infinity if unknown."""
    begun = start_time(ancestor(MPI_LAUNCHERS) or os.getppid())
    if not begun:
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(begun) / os.sysconf("SC_CLK_TCK")


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_rank(pid: int) -> bool:
    """Whether a process has a rank variable and this process's command line. Excludes other jobs of a shell."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        program = Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False
    return program and any(word.partition(b"=")[0] in RANK_NUMBERS for word in words)


def _state_and_parent(pid: int) -> tuple[str, int]:
    state, parent, *_ = _read(pid, "stat").rpartition(")")[2].split() or ("", "0")
    return state, int(parent)


def _read(pid: int, name: str) -> str:
    """Contents of a file in ``/proc/PID``; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
