"""cgroup_limits: CPU time and memory that each rank of a node can use."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from labinfer.base.errors import UserError
from labinfer.comm.group.rank_group import RankGroup
from labinfer.comm.spmd.accelerator import hardware_name, memory_info
from labinfer.comm.spmd.cgroup import Cgroup
from labinfer.comm.spmd.devices import DeviceName, num_sharing, torch_device
from labinfer.comm.spmd.machine import free_memory
from labinfer.native.compiler import processor


def cpu_share(group: RankGroup) -> float:
    """CPUs that the cgroup quota grants this rank. Ranks on the same CPUs share the quota. Infinity without a quota."""
    here = group.everyone[group.rank]
    return Cgroup().cpu_quota() / sum(info.node == here.node and bool(info.cpus & here.cpus) for info in group.everyone)


def describe_hardware(group: RankGroup, device: torch.device) -> str:
    """Product name of this rank's accelerator; for the CPU, processor model, number of threads and CPU quota."""
    if device.type != "cpu":
        return hardware_name(device)
    here, count = group.everyone[group.rank], group.threads.count
    lines = (line.partition(":") for line in processor().splitlines())
    names = [value.strip() for key, _, value in lines if key.strip() == "model name"]
    quota = f" of {here.cpu_limit:.3g} CPUs" if here.cpu_limit < count else ""
    return f"{(names or ['CPU'])[0]}, {count} thread{'s' * (count > 1)}{quota}"


def memory_share(group: RankGroup, devices: Mapping[int, DeviceName]) -> int:
    """Free bytes of this rank's device, divided by the number of ranks that use its memory.

    Args:
        devices: device of each rank.

    Raises:
        UserError: torch does not report the free memory of an accelerator.
    """
    device = torch_device(devices[group.rank])
    if device.type != "cpu" and memory_info(device) is None:
        raise UserError(
            f"torch does not tell the free memory of {device}, which a plan depends on; give a layout by flags, with --num-kv-blocks"
        )
    return free_memory(device) // num_sharing(group.rank, devices, group.everyone)
