"""cgroup_limits: CPU time and memory that each rank of a node can use."""

from __future__ import annotations

import torch

from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.cgroup import Cgroup
from labinfer.comm.spmd.machine import free_memory
from labinfer.native.compiler import processor


def cpu_share(group: RankGroup) -> float:
    """CPUs that the cgroup quota grants this rank. Ranks on the same CPUs share the quota. Infinity without a quota."""
    here = group.everyone[group.rank]
    return Cgroup().cpu_quota() / sum(info.node == here.node and bool(info.cpus & here.cpus) for info in group.everyone)


def describe_hardware(group: RankGroup) -> str:
    """Processor model, number of threads and CPU quota of this rank."""
    here, count = group.everyone[group.rank], group.threads.count
    lines = (line.partition(":") for line in processor().splitlines())
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    quota = f" of {here.cpu_limit:.3g} CPUs" if here.cpu_limit < count else ""
    return f"{(names or ['CPU'])[0]}, {count} thread{'s' * (count > 1)}{quota}"


def memory_share(group: RankGroup, device: torch.device) -> int:
    """Free bytes of ``device``'s memory, divided by the number of ranks of the node that use this memory."""
    sharing = group.num_sharing_memory
    if device.type != "cpu":
        here = group.everyone[group.rank]
        on_node = sum(info.node == here.node for info in group.everyone)
        sharing = -(-on_node // max(1, here.num_accelerators))
    return free_memory(device) // sharing
