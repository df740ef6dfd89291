"""Resources of this rank's machine: devices, cores and memory."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from labinfer.base.errors import UserError
from labinfer.comm.spmd.accelerator import (
    accelerator_ids,
    empty_cache,
    max_memory_allocated,
    memory_info,
    memory_reserved,
)
from labinfer.comm.spmd.address_space import address_space_left, address_space_limit
from labinfer.comm.spmd.cgroup import Cgroup
from labinfer.comm.spmd.processes import pid_space

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt(3)``, as in glibc's malloc.h."""
LARGEST_KEPT, LARGEST_KEPT_EARLIER = 256 << 20, 32 << 20
"""Largest allocation in bytes that malloc keeps when it is freed. glibc before 2.35 accepts at most the second value."""
LARGEST_LOADED = (1 << 31) - 1
"""Largest unpacked matrix in bytes whose memory the next ones reuse while weights are loaded; the largest value of ``mallopt(3)``."""


UNKNOWN_BYTES = 1 << 50
"""Stands for an unknown amount of free memory: more than any accelerator has."""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Machine of a rank and its place on it, sent to every other rank at the start."""

    rank: int
    local_rank: int
    node: str
    cores: list[list[int]]
    """CPUs (hardware threads) of each core that this rank may run on, neighbouring cores next to each other."""
    num_cpus: int
    """Number of CPUs of the node."""
    cpu_limit: float
    """CPUs that the rank's container may use (fractional); all CPUs of the node without a quota."""
    accelerator: str
    """Device type that torch offers besides the CPU; empty if none."""
    num_accelerators: int
    accelerator_ids: list[str] = []
    """Identifier of each accelerator on the node, see ``accelerator.accelerator_ids``; empty if they are told apart by number."""
    torch_version: str
    addresses: list[str] = []
    """Network addresses of the machine, without loopback."""
    pid: int = 0
    pid_space: str = ""
    """Identifier of the PID namespace; equal for ranks that can see each other's processes."""
    memory_group: int = 0
    """Inode of the control group with the smallest memory limit; equal for ranks under one limit. 0 without a limit."""
    plugins: list[str] = []
    """Values of ``--plugin``."""

    @property
    def memory(self) -> tuple[str, int]:
        """Identifier of the host memory that the rank uses: the machine's, or that of a container or task."""
        return self.node, self.memory_group

    @property
    def cpus(self) -> set[int]:
        """CPUs that this rank may run on."""
        return {cpu for core in self.cores for cpu in core}


def describe_rank(
    rank: int,
    local_rank: int,
    node: str,
    addresses: Sequence[str] = (),
    plugins: Sequence[str] = (),
    *,
    uses_accelerator: bool = False,
) -> RankInfo:
    """``RankInfo`` of this process.

    Args:
        uses_accelerator: whether to read the identifiers of accelerators, which initializes their library.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        node=node,
        cores=usable_cores(),
        num_cpus=os.cpu_count() or 1,
        cpu_limit=cpu_limit(),
        accelerator=accelerator.type if accelerator else "",
        num_accelerators=count,
        accelerator_ids=accelerator_ids(accelerator.type, count) if accelerator and uses_accelerator else [],
        torch_version=str(torch.__version__),  # a str subclass, which msgspec does not accept
        addresses=list(addresses),
        pid=os.getpid(),
        pid_space=pid_space(),
        memory_group=Cgroup().memory_group(),
        plugins=list(plugins),
    )


def usable_cores(cpus: Iterable[int] | None = None, system: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """CPUs of this process's affinity mask by core, ordered by socket and NUMA node.

    CPUs are often numbered with the second hardware threads of all cores after the first ones, so a range of numbers would contain
    half of every core.

    Args:
        cpus: affinity mask; default: that of this process.
    """
    cores: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0) if cpus is None else cpus):
        topology = system / f"cpu{cpu}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            siblings = (topology / "thread_siblings_list").read_text()  # "3,67" or "6-7"
            first = int(siblings.replace("-", ",").split(",")[0])
        except (OSError, ValueError):  # unknown: take each CPU for a core
            socket, first = 0, cpu
        cores.setdefault((socket, numa_node(cpu, system), first), []).append(cpu)
    return [cores[place] for place in sorted(cores)]


def last_level_caches(system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Total size of a machine's last-level caches in bytes; 0 if unknown. Independent of the rank's affinity mask."""
    sizes: dict[str, int] = {}
    for folder in system.glob("cpu[0-9]*"):
        levels = sorted((folder / "cache").glob("index*"))
        try:
            size = (levels[-1] / "size").read_text().strip()  # "32768K"
            sizes[(levels[-1] / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) << 10
        except (IndexError, OSError, ValueError):
            continue
    return sum(sizes.values())


def numa_node(cpu: int, system: Path = Path("/sys/devices/system/cpu")) -> int:
    """NUMA node of a CPU; 0 if unknown."""
    folders = [path.name.removeprefix("node") for path in (system / f"cpu{cpu}").glob("node[0-9]*")]
    return int(folders[0]) if folders else 0


def cpu_limit() -> float:
    """CPUs that a container's quota allows (fractional); all CPUs without a quota."""
    return min(Cgroup().cpu_quota(), os.cpu_count() or 1)


def free_memory(device: torch.device, num_kv_blocks: int = 0) -> int:
    """Free bytes of a device; for the CPU, the kernel's available memory within the limits of the container and of this process.

    Args:
        num_kv_blocks: ``--num-kv-blocks``. If it is given, an accelerator whose free memory is unknown has ``UNKNOWN_BYTES``.

    Raises:
        UserError: torch does not report the free memory of an accelerator.
    """
    if device.type == "cpu":
        available = _meminfo("MemAvailable")
        return int(min(available, Cgroup().memory_left(), address_space_left()))
    if (info := memory_info(device)) is None:
        if num_kv_blocks:
            return UNKNOWN_BYTES
        raise UserError(
            f"torch does not tell the free memory of {device}, which the size of the KV cache depends on; give --num-kv-blocks"
        )
    return info[0]


def total_memory(device: torch.device) -> int:
    """Total bytes of a device, 0 if torch does not report them; for the CPU, the machine's memory within the limits of container and process."""
    if device.type != "cpu":
        return (memory_info(device) or (0, 0))[1]
    return int(min(_meminfo("MemTotal"), Cgroup().memory_limit(), address_space_limit()))


def used_memory(device: torch.device, total: int) -> int:
    """Used bytes of a device's ``total_memory``: for the CPU of all processes, for an accelerator of this process. The accelerator itself is
    not queried, as another thread may be capturing a graph."""
    if device.type != "cpu":
        return memory_reserved(device)
    return max(0, total - free_memory(device))


def _meminfo(name: str) -> int:
    """Bytes in the line ``name`` of ``/proc/meminfo``."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def peak_memory(device: torch.device) -> int:
    """Peak memory of this rank in bytes: resident memory, plus allocations on an accelerator."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return resident if device.type == "cpu" else resident + max_memory_allocated(device)


def keep_freed_memory(largest: int = LARGEST_KEPT) -> None:
    """Let malloc keep memory that a step frees, instead of returning it to the system.

    Otherwise the activations of a large batch are mapped anew in every layer, with a page fault for each page. Changes the process
    until the next call; no effect without glibc (``mallopt(3)``).

    Args:
        largest: largest allocation in bytes that malloc keeps, less than 2 GiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, largest) or mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_EARLIER)
        mallopt(M_TRIM_THRESHOLD, largest)


def return_freed_memory() -> None:
    """Return free memory to the system, such as that of a model that was just dropped, even after ``keep_freed_memory``. On CPUs no
    effect without glibc (``malloc_trim(3)``)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    empty_cache()


def private_memory() -> int:
    """Resident bytes of this process, without mapped files, whose pages the system can drop."""
    return _resident("RssAnon", "RssShmem")


def resident_memory() -> int:
    """Resident bytes of this process, with those of mapped files."""
    return _resident("RssAnon", "RssShmem", "RssFile")


def _resident(*names: str) -> int:
    """Sum of the lines ``names`` of ``/proc/self/status``, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in names) * 1024
