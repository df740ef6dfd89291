"""Processes under another one, found in ``/proc``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

Words = list[str]
"""A command line."""
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")


def processes(ancestor: int, matches: Callable[[Words], bool] = lambda words: True) -> list[int]:
    """Descendants of a process whose command line matches, and it itself, in the order of their numbers."""
    return sorted(
        pid for pid in [ancestor, *descendants(ancestor)] if (words := entries(pid, "cmdline")) and matches(words)
    )


def descendants(ancestor: int) -> list[int]:
    """Processes below this one, each after the one above it."""
    children: dict[int, list[int]] = {}
    for pid in all_processes():
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    below = [ancestor]
    for pid in below:
        below += children.get(pid, [])
    return below[1:]


def marked_processes(variable: str) -> list[int]:
    """Running processes that have this in their environment, such as ``NAME=value``, whoever is above them by now."""
    return [pid for pid in all_processes() if variable in entries(pid, "environ") and is_running(pid)]


def all_processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def entries(pid: int, name: str) -> Words:
    """Strings in a process's ``cmdline`` or ``environ``; none where it has gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def is_rank(words: Words) -> bool:
    """Whether a process runs ``launch.py`` as a rank: it is neither a launcher nor the supervisor."""
    programs = [Path(word).name for word in words]
    return (
        programs[0].startswith("python")
        and "launch.py" in programs
        and not {"supervise", "torchrun", "mpirun"} & set(programs)
    )


def is_gateway(words: Words) -> bool:
    return "labinfer.server.gateway.main" in words


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie; one whose first thread is a zombie still has its files as long as it has others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    state, num_threads = fields[0], int(fields[17])
    return state != "Z" or num_threads > 1


def rank_number(pid: int) -> int:
    """The number that the launcher gave a rank; -1 where it is no rank."""
    variables = dict(entry.partition("=")[::2] for entry in entries(pid, "environ"))
    return next((int(variables[name]) for name in RANK_VARIABLES if name in variables), -1)


def own_megabytes(pid: int) -> float:
    """Memory of a process without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    return 0.0
