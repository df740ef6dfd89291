"""ThreadChoice: the number of CPU threads of a rank, and the cores that are its own.

A thread that another rank's thread pushes off its core holds up all ranks of a step, as they wait for each other. So the
ranks of a node share out its cores, and each stays on its own.
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
    """CPU threads of this rank, and the reason for their number."""

    count: int
    reason: str
    bound_to: tuple[int, ...] = ()
    """CPUs that the threads stay on; empty where the rank keeps the mask it was started with."""

    def describe(self) -> str:
        """One line for the log of a start."""
        text = f"{self.count} CPU thread{'s' * (self.count != 1)} a rank ({self.reason})"
        return f"{text}, bound to CPU {format_ranges(self.bound_to)} on this one" if self.bound_to else text


def choose_threads(
    mine: RankInfo, everyone: Sequence[RankInfo], flag: int, omp_num_threads: int, omp_forced: bool
) -> ThreadChoice:
    """Threads of this rank: ``--threads``, else OMP_NUM_THREADS if the user set it, else one for each core of its own.

    A rank is bound to its own cores where other ranks were started on the same ones and its threads have room there. A mask
    given by the launcher or Slurm is only ever narrowed.

    Args:
        flag: ``--threads``; 0 where it is not given.
        omp_num_threads, omp_forced: as in ``LaunchEnvironment``.
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
        reason += "; torchrun had set OMP_NUM_THREADS=1, which is not followed: --threads 1 is"
    # All ranks or none: a rank that is not bound would push bound ones aside. The smallest share is one that all have.
    room = len(mine.cores) // len(sharing) if flag or omp_num_threads else len(own)
    bound = len(sharing) > 1 and count <= room and bool(own)
    return ThreadChoice(count, reason, tuple(cpu for core in own for cpu in core) if bound else ())


def own_cores(mine: RankInfo, everyone: Sequence[RankInfo]) -> list[list[int]]:
    """This rank's share of the cores on which it was started together with other ranks of its node.

    Empty where there are more ranks than cores, and where masks overlap without being equal.
    """
    sharing = _sharing(mine, everyone)
    if len(sharing) > len(mine.cores) or any(info.cores != mine.cores for info in sharing):
        return []
    begin, end = shard_range(len(mine.cores), len(sharing))[sharing.index(mine)]
    return mine.cores[begin:end]


def advice_on_memory(nodes: Iterable[int], num_ranks: int) -> str:
    """Advice where a rank computes on CPUs of several NUMA nodes; empty where it does not.

    Args:
        nodes: those of its CPUs.
    """
    count = len(set(nodes))
    if count < 2:
        return ""
    return (
        f"rank 0 computes on {count} NUMA nodes, and reads much of its weights from memory that is far from it; a rank for each node is "
        f"faster: {count * num_ranks} ranks in place of {num_ranks}, with {count} times as much for -tp (-tp {count} where it was not given)"
    )


def format_ranges(cpus: Iterable[int]) -> str:
    """CPU numbers as the kernel and ``taskset`` write them: 0, 1, 2, 5 → ``0-2,5``."""
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
    """Keep this process on these CPUs: its present threads, and by inheritance those that they start."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended, or may not be bound: slower, but no harm
            os.sched_setaffinity(int(thread.name), cpus)


def _sharing(mine: RankInfo, everyone: Sequence[RankInfo]) -> list[RankInfo]:
    """The ranks that may run on a CPU this rank may run on; itself included."""
    return [info for info in everyone if info.node == mine.node and info.cpus & mine.cpus]


def _reason(mine: RankInfo, num_sharing: int) -> str:
    cores, limit = len(mine.cores), mine.cpu_limit
    text = f"{cores} core{'s' * (cores != 1)}"
    if (
        limit < cores
    ):  # a thread more than whole CPUs would be stopped for part of every period, and the others wait for it
        text = f"{limit:.3g} CPU{'s' * (limit > 1)} of {text}, by the container's quota"
    if num_sharing > 1:
        text += f" shared by {num_sharing} ranks"
    if len(mine.cpus) < mine.num_cpus:
        text += f"; this rank may use {len(mine.cpus)} of the node's {mine.num_cpus} CPUs"
    return text
