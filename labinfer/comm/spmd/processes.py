"""Processes of this machine, as the kernel tells of them (Linux, ``proc(5)``)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Container
from pathlib import Path

STOPPED = "T"
START_TIME = 19
"""Place of the time at which a process began, counted behind its name in ``/proc/PID/stat``."""
MPI_LAUNCHERS = ("hydra_pmi_proxy", "slurmstepd", "mpirun", "mpiexec", "mpiexec.hydra")
"""Names of programs that start ranks which use MPICH; on other machines than the first, only the first two run."""
RANK_NUMBERS = (b"RANK", b"PMI_RANK", b"OMPI_COMM_WORLD_RANK", b"SLURM_PROCID")
"""Variables in which launchers tell a process its number."""


def pid_space() -> str:
    """Name of this machine's, or this container's, set of process ids; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def stopped_siblings() -> list[int]:
    """Process ids of those that this process's launcher started as ranks, too, and that are stopped."""
    own = os.getppid()
    return [pid for pid in _all() if _state_and_parent(pid) == (STOPPED, own) and _is_rank(pid)]


def stopped_ancestor() -> int:
    """Process id of the nearest process above this one that is stopped; 0 where none is."""
    pid = os.getppid()
    while pid > 1:
        state, parent = _state_and_parent(pid)
        if state == STOPPED:
            return pid
        pid = parent
    return 0


def ancestor(names: Container[str]) -> int:
    """Process id of the nearest process above this one whose program has one of these names; 0 where there is none."""
    pid = os.getppid()
    while pid > 1 and _read(pid, "comm").strip() not in names:
        pid = _state_and_parent(pid)[1]
    return pid if pid > 1 else 0


def descendants(pid: int) -> list[int]:
    """Process ids below a process, each after the one above it."""
    parents = {each: _state_and_parent(each)[1] for each in _all()}
    below = [pid]
    for above in below:
        below += [each for each, parent in parents.items() if parent == above]
    return below[1:]


def start_time(pid: int) -> str:
    """The time at which a process began, by which it differs from a later one with its number; empty where there is none."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return fields[START_TIME] if fields else ""


def mpi_launcher_began() -> float:
    """When the MPI launcher of this process, or its part on this machine, was started, in seconds since 1970; infinity where the
    system does not tell."""
    begun = start_time(ancestor(MPI_LAUNCHERS) or os.getppid())
    if not begun:
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(begun) / os.sysconf("SC_CLK_TCK")


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_rank(pid: int) -> bool:
    """Whether a process was started with a rank's number, and with this program: a shell's other jobs are none of ours."""
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
    """A file of a process; empty where it has gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
