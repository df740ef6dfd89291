"""Cgroup: CPU and memory limits of this process's control groups (versions 1 and 2).

A container, a batch system or an administrator sets them. Limits of enclosing groups apply, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_V2 = "cgroup2"
"""File system type of cgroup version 2."""
THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
"""Counters of throttled time in ``cpu.stat`` of versions 2 and 1, with their units in seconds."""
UNLIMITED = 1 << 62
"""Memory limits from this many bytes on mean no limit; version 1 always has a number."""


@dataclass(frozen=True)
class Cgroup:
    """Control groups of a process.

    Args:
        process: folder of the process in ``/proc``.
    """

    process: Path = Path("/proc/self")

    def cpu_quota(self) -> float:
        """CPUs that the process may use (fractional); infinity without a quota."""
        shares = [math.inf]
        for folder in self._folders("cpu"):
            numbers = _words(folder / "cpu.max")
            if not numbers:
                numbers = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
            quota, period = (_number(word) for word in (*numbers, "max", "max")[:2])
            if quota > 0 and 0 < period < math.inf:  # a quota of -1 (version 1) or max (version 2) means none
                shares.append(quota / period)
        return min(shares)

    def throttled_time(self) -> float:
        """Seconds for which the process's groups were throttled, summed over CPUs; 0 if not counted."""
        times = [0.0]
        for folder in self._folders("cpu"):
            words = _words(folder / "cpu.stat")
            counters = dict(zip(words[::2], words[1::2], strict=False))
            times += [float(counters[name]) * unit for name, unit in THROTTLED.items() if name in counters]
        return max(times)

    def memory_limit(self) -> float:
        """Memory limit of the process's groups in bytes; infinity without a limit."""
        limits = [_limit(folder) for folder in self._folders("memory")]
        return min(limits, default=math.inf)

    def memory_group(self) -> int:
        """Inode of the group with the smallest memory limit; equal for processes under the same limit. 0 without a limit."""
        limits = [(_limit(folder), folder) for folder in self._folders("memory")]
        # Of groups with equal limits the outermost counts: batch systems give a job and its steps the same limit.
        least, folder = min(reversed(limits), key=lambda item: item[0], default=(math.inf, Path()))
        return folder.stat().st_ino if least < UNLIMITED else 0

    def memory_left(self) -> float:
        """Bytes left below the tightest memory limit, including file pages that the kernel can drop; infinity without a limit."""
        rooms = [math.inf]
        for folder in self._folders("memory"):
            used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
            if used:
                rooms.append(_limit(folder) - _number(used[0]) + _inactive_file(folder))
        return min(rooms)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Folders with a controller's files: of the process's group, then of its visible ancestors."""
        try:
            groups = [line.split(":", 2) for line in _text(self.process / "cgroup").splitlines()]
            mounts = [line.split() for line in _text(self.process / "mountinfo").splitlines()]
        except OSError:  # not Linux
            return
        paths = {name: path for _, names, path in groups for name in names.split(",")}  # version 2 has an empty name
        for fields in mounts:
            # Between the fields is a source, which may be empty or contain spaces.
            kind, *_, options = fields[fields.index("-") + 1 :]
            version = "" if kind == CGROUP_V2 else controller
            if kind not in ("cgroup", CGROUP_V2) or version not in paths:
                continue
            if kind == "cgroup" and controller not in options.split(","):
                continue
            root, mounted = Path(fields[3]), Path(fields[4])
            path = Path(paths[version])
            # A container sees its own group as the root.
            below = path.relative_to(root) if path.is_relative_to(root) else Path()
            for folder in (below, *below.parents):
                yield mounted / folder


def _limit(folder: Path) -> float:
    words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
    return _number(words[0]) if words else math.inf


def _inactive_file(folder: Path) -> float:
    """Bytes of inactive file pages of a group and its descendants."""
    words = _words(folder / "memory.stat")
    counters = dict(zip(words[::2], words[1::2], strict=False))
    return float(counters.get("total_inactive_file", counters.get("inactive_file", 0)))


def _text(path: Path) -> str:
    """Text of a file. Paths in it may be in any encoding: bytes that are not UTF-8 become surrogates."""
    return path.read_text(errors="surrogateescape")


def _words(path: Path) -> list[str]:
    """Words of a file; empty if it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(word: str) -> float:
    """Number in ``word``; infinity for ``max`` and other text."""
    return float(word) if word.lstrip("-").isdigit() else math.inf
