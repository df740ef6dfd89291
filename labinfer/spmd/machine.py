"""What this rank's machine offers: devices, cores and memory."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from labinfer.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
LARGEST_KEPT = 1 << 30


class RankInfo(msgspec.Struct, frozen=True):
    """What every rank tells every other at the start."""

    rank: int
    local_rank: int
    node: str
    cpus: list[int]
    """The cores this rank may run on."""
    num_cpus: int
    """Cores of the node."""
    cpu_limit: int
    """Whole cores' worth of time its container may use."""
    accelerator: str
    """Device type torch offers beside the CPU; empty for none."""
    num_accelerators: int
    torch_version: str


@dataclass(frozen=True)
class ThreadChoice:
    """CPU threads for this rank, and why."""

    count: int
    reason: str


def describe_rank(rank: int, local_rank: int, node: str) -> RankInfo:
    """This process's own entry."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    return RankInfo(
        rank,
        local_rank,
        node,
        usable_cpus(),
        os.cpu_count() or 1,
        cpu_limit(),
        accelerator.type if accelerator else "",
        count,
        str(torch.__version__),  # a str subclass that msgspec does not take
    )


def resolve_device(wanted: str, info: RankInfo) -> torch.device:
    """``auto`` is the machine's accelerator if torch knows one, otherwise the CPU. Ranks of a node share its devices in turn.

    Raises:
        UserError: torch has no such device there.
    """
    kind, _, index = wanted.partition(":")
    if kind == "auto":
        kind = info.accelerator or "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if kind != info.accelerator or (index and not index.isdigit()) or int(index or 0) >= info.num_accelerators:
        here = f"cpu and {info.num_accelerators} x {info.accelerator}" if info.accelerator else "only cpu"
        raise UserError(f"--device {wanted}: torch {info.torch_version} on {info.node} offers {here}")
    return torch.device(kind, int(index) if index else info.local_rank % info.num_accelerators)


def usable_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def cpu_limit() -> int:
    """Whole cores a container's CPU quota allows (cgroup v2 ``cpu.max``), or all."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or no quota ("max")
        return os.cpu_count() or 1


def choose_threads(
    mine: RankInfo, everyone: Sequence[RankInfo], wanted: int, omp_num_threads: int, omp_forced: bool
) -> ThreadChoice:
    """CPU threads for this rank: the flag, else OMP_NUM_THREADS if a person set it, else an even share of the cores.

    Launchers that bind ranks give each its own cores; without binding, the ranks of a node that see the same cores share them.
    """
    if wanted:
        return ThreadChoice(wanted, "--threads")
    if omp_num_threads:
        return ThreadChoice(omp_num_threads, f"OMP_NUM_THREADS={omp_num_threads}")
    sharing = [info for info in everyone if info.node == mine.node and set(info.cpus) & set(mine.cpus)]
    cores = min(len(mine.cpus), mine.cpu_limit)
    share = max(1, cores // len(sharing))
    reason = f"{cores} core{'s' * (cores != 1)} shared by {len(sharing)} rank{'s' * (len(sharing) != 1)}"
    if omp_forced and share > 1:
        reason += "; torchrun had set OMP_NUM_THREADS=1"
    if len(mine.cpus) < mine.num_cpus:
        reason += f"; this rank may use {len(mine.cpus)} of the node's {mine.num_cpus} cores"
    return ThreadChoice(share, reason)


def is_oversubscribed(everyone: Sequence[RankInfo], node: str) -> bool:
    """Whether this node has more ranks than cores, so that a waiting rank must give its core away at once."""
    here = [info for info in everyone if info.node == node]
    cores = set().union(*(info.cpus for info in here))
    return len(here) > min(len(cores), min(info.cpu_limit for info in here))


def free_memory(device: torch.device) -> int:
    """Bytes free on a device; for the CPU what the system calls available."""
    if device.type == "cpu":
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
                    return min(available, _cgroup_memory_left(available))
    return torch.accelerator.get_memory_info(device)[0]


def _cgroup_memory_left(default: int) -> int:
    """What a container's limit leaves (cgroup v2); file pages that the kernel would drop count as free."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            left = int(limit.read()) - int(current.read())
        with open("/sys/fs/cgroup/memory.stat") as statistics:
            return left + sum(int(line.split()[1]) for line in statistics if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return default


def peak_memory(device: torch.device) -> int:
    """Bytes this rank has held at most: resident memory, plus what an accelerator had allocated."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return resident if device.type == "cpu" else resident + torch.accelerator.max_memory_allocated(device)


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one, instead of giving it back to the system.

    The activations of a large batch would else be mapped anew in every layer, at the cost of a fault for each of their
    pages. Only glibc can be told (mallopt(3)); others do as they do.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, LARGEST_KEPT)
