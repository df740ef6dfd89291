"""What this rank's machine offers: devices, cores and memory."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from labinfer.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
LARGEST_KEPT, LARGEST_KEPT_EARLIER = 256 << 20, 32 << 20
"""Bytes; the second is all that glibc before 2.35 takes."""


class RankInfo(msgspec.Struct, frozen=True):
    """What every rank tells every other at the start."""

    rank: int
    local_rank: int
    node: str
    cores: list[list[int]]
    """The cores this rank may run on, neighbours beside each other; of each its CPUs, which are its hardware threads."""
    num_cpus: int
    """CPUs of the node."""
    cpu_limit: int
    """Whole CPUs' worth of time its container may use."""
    accelerator: str
    """Device type torch offers beside the CPU; empty for none."""
    num_accelerators: int
    torch_version: str

    @property
    def cpus(self) -> set[int]:
        """All that it may run on."""
        return {cpu for core in self.cores for cpu in core}


def describe_rank(rank: int, local_rank: int, node: str) -> RankInfo:
    """This process's own entry."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    return RankInfo(
        rank,
        local_rank,
        node,
        usable_cores(),
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


def usable_cores(cpus: Iterable[int] | None = None, system: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """The CPUs of this process's affinity mask by core, the cores of a socket one after another.

    CPUs are often numbered so that the second hardware threads of all cores come after the first ones of all sockets;
    a run of numbers would be half of every core.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0) if cpus is None else cpus):
        topology = system / f"cpu{cpu}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            siblings = (topology / "thread_siblings_list").read_text()  # "3,67" or "6-7"
            first = int(siblings.replace("-", ",").split(",")[0])
        except (OSError, ValueError):  # the system does not say: a core of its own
            socket, first = 0, cpu
        found.setdefault((socket, first), []).append(cpu)
    return [found[place] for place in sorted(found)]


def cpu_limit() -> int:
    """Whole CPUs a container's CPU quota allows (cgroup v2 ``cpu.max``), or all."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or no quota ("max")
        return os.cpu_count() or 1


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
    pages. Only glibc can be told (mallopt(3)); others do as they do. It holds for the whole process, and stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) or mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_EARLIER)
        mallopt(M_TRIM_THRESHOLD, LARGEST_KEPT)


def private_memory() -> int:
    """Bytes of host memory this process holds now that are no pages of mapped files: those the system can drop."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
