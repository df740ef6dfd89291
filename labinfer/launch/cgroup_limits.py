"""cgroup_limits: processor time and memory that a rank has, where the ranks of a node share them."""

from __future__ import annotations

import torch

from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.cgroup import Cgroup
from labinfer.comm.spmd.machine import free_memory
from labinfer.native.compiler import processor


def cpu_share(group: RankGroup) -> float:
    """CPUs' worth of time that a quota grants this rank, where ranks on the same CPUs share it; infinity without one."""
    here = group.everyone[group.rank]
    return Cgroup().cpu_quota() / sum(info.node == here.node and bool(info.cpus & here.cpus) for info in group.everyone)


def describe_hardware(group: RankGroup) -> str:
    """The processor, and how much of it a rank has."""
    here, count = group.everyone[group.rank], group.threads.count
    lines = (line.partition(":") for line in processor().splitlines())
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    quota = f" of {here.cpu_limit:.3g} CPUs" if here.cpu_limit < count else ""
    return f"{(names or ['CPU'])[0]}, {count} thread{'s' * (count > 1)}{quota}"


def memory_share(group: RankGroup, device: torch.device) -> int:
    """Bytes that are free for this rank, where the ranks of its node share them out."""
    sharing = group.num_sharing_memory
    if device.type != "cpu":
        here = group.everyone[group.rank]
        on_node = sum(info.node == here.node for info in group.everyone)
        sharing = -(-on_node // max(1, here.num_accelerators))
    return free_memory(device) // sharing
