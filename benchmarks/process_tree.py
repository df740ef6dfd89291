"""Processes under another one, found in ``/proc``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

Words = list[str]
"""A command line."""


def processes(ancestor: int, matches: Callable[[Words], bool] = lambda words: True) -> list[int]:
    """Descendants of a process whose command line matches, and it itself, in the order of their numbers."""
    parents, lines = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                lines[int(folder.name)] = (folder / "cmdline").read_text().split("\0")[:-1]

    def descends(pid: int) -> bool:
        return pid == ancestor or (pid in parents and descends(parents[pid]))

    return sorted(pid for pid, words in lines.items() if words and matches(words) and descends(pid))


def is_rank(words: Words) -> bool:
    """Whether a process runs ``launch.py`` as a rank: it is neither a launcher nor the supervisor."""
    programs = [Path(word).name for word in words]
    return (
        programs[0].startswith("python")
        and "launch.py" in programs
        and not {"supervise", "torchrun", "mpirun"} & set(programs)
    )


def is_gateway(words: Words) -> bool:
    return "labinfer.gateway.main" in words


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rank_number(pid: int) -> int:
    """The number that the launcher gave a rank; -1 where it is no rank."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
            name, _, value = entry.partition("=")
            if name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
                return int(value)
    return -1


def own_megabytes(pid: int) -> float:
    """Memory of a process without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    return 0.0
