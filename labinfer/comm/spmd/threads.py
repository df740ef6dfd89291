"""ThreadChoice: number of CPU threads of a rank, and the cores that it is bound to.

A thread that loses its core to another rank's thread delays all ranks of a step, as they wait for each other. The ranks of a node
therefore divide its cores, and each is bound to its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from labinfer.comm.spmd.machine import RankInfo
from labinfer.comm.spmd.topology import shard_range


@dataclass(frozen=True)
class ThreadChoice:
    """Number of CPU threads of this rank, and the reason for it."""

    count: int
    reason: str
    bound_to: tuple[int, ...] = ()
    """CPUs that the threads are bound to; empty if the rank keeps its initial affinity mask."""

    def describe(self) -> str:
        """The choice in one line, for the startup log."""
        text = f"{self.count} CPU thread{'s' * (self.count != 1)} per rank ({self.reason})"
        return f"{text}, bound to CPU {format_ranges(self.bound_to)} on this rank" if self.bound_to else text


def choose_threads(
    mine: RankInfo, everyone: Sequence[RankInfo], flag: int, omp_num_threads: int, omp_forced: bool
) -> ThreadChoice:
    """Threads of this rank: ``--threads``, else the user's OMP_NUM_THREADS, else one per core of the rank's share.

    A rank is bound to its own cores if other ranks started on the same cores and its threads fit there. A mask set by the launcher or
    Slurm is only ever narrowed.

    Args:
        flag: ``--threads``; 0 if not given.
        omp_num_threads, omp_forced: see ``LaunchEnvironment``.
    """
    sharing = _sharing(mine, everyone)
    own = own_cores(mine, everyone)
    begin, end = shard_range(int(mine.cpu_limit), len(sharing))[sharing.index(mine)]
    count = max(1, min(len(own) or len(mine.cores) // len(sharing), end - begin))
    reason = _reason(mine, len(sharing))
    if flag:
        count, reason = flag, "--threads"
    elif omp_num_threads:
        count, reason = omp_num_threads, f"OMP_NUM_THREADS={omp_num_threads}"
    elif omp_forced and count > 1:
        reason += "; OMP_NUM_THREADS=1 set by torchrun is ignored, use --threads 1 to get it"
    # All ranks or none: an unbound rank would displace bound ones. The smallest share decides for all.
    room = len(mine.cores) // len(sharing) if flag or omp_num_threads else len(own)
    bound = len(sharing) > 1 and count <= room and bool(own)
    return ThreadChoice(count, reason, tuple(cpu for core in own for cpu in core) if bound else ())


def own_cores(mine: RankInfo, everyone: Sequence[RankInfo]) -> list[list[int]]:
    """Share of this rank in the cores on which it and other ranks of its node were started.

    Empty if ranks outnumber cores, or if masks overlap without being equal.
    """
    sharing = _sharing(mine, everyone)
    if len(sharing) > len(mine.cores) or any(info.cores != mine.cores for info in sharing):
        return []
    begin, end = shard_range(len(mine.cores), len(sharing))[sharing.index(mine)]
    return mine.cores[begin:end]


def advice_on_memory(nodes: Iterable[int], num_ranks: int) -> str:
    """Advice if a rank computes on CPUs of several NUMA nodes; empty otherwise.

    Args:
        nodes: NUMA nodes of the rank's CPUs.
    """
    count = len(set(nodes))
    if count < 2:
        return ""
    return (
        f"rank 0 spans {count} NUMA nodes and reads part of its weights from remote memory; one rank per NUMA node "
        f"is faster: start {count * num_ranks} ranks instead of {num_ranks}, with {count} times the -tp (-tp "
        f"{count} if not given)"
    )


def format_ranges(cpus: Iterable[int]) -> str:
    """CPU numbers in the format of the kernel and ``taskset``: 0, 1, 2, 5 → ``0-2,5``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{begin}-{end}" if end > begin else str(begin) for begin, end in runs)


def is_oversubscribed(everyone: Sequence[RankInfo], node: str) -> bool:
    """Whether this node has more ranks than CPUs, so that a waiting rank must yield its CPU at once."""
    here = [info for info in everyone if info.node == node]
    cpus = set().union(*(info.cpus for info in here))
    return len(here) > min(len(cpus), min(info.cpu_limit for info in here))


def bind(cpus: Iterable[int]) -> None:
    """Bind this process to ``cpus``: its existing threads and those that they start."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended or may not be bound: slower, but harmless
            os.sched_setaffinity(int(thread.name), cpus)


def _sharing(mine: RankInfo, everyone: Sequence[RankInfo]) -> list[RankInfo]:
    """Ranks whose CPUs overlap with those of this rank, including this rank."""
    return [info for info in everyone if info.node == mine.node and info.cpus & mine.cpus]


def _reason(mine: RankInfo, num_sharing: int) -> str:
    cores, limit = len(mine.cores), mine.cpu_limit
    text = f"{cores} core{'s' * (cores != 1)}"
    if limit < cores:  # an extra thread would be throttled in every period, and the others would wait for it
        text = f"{limit:.3g} CPU{'s' * (limit > 1)} of {text} (CPU quota of the container)"
    if num_sharing > 1:
        text += f" shared by {num_sharing} ranks"
    if len(mine.cpus) < mine.num_cpus:
        text += f"; CPU affinity: {len(mine.cpus)} of the node's {mine.num_cpus} CPUs"
    return text
