"""Devices of all ranks: which one a rank uses, and which ranks share one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from labinfer.base.errors import UserError
from labinfer.comm.spmd.machine import RankInfo


@dataclass(frozen=True)
class DeviceName:
    """Type and index of the device of any rank.

    A ``torch.device`` can only name the device types that torch knows in this process. A type such as ``npu`` or ``musa`` is known
    only where its plugin of torch is loaded, so a rank cannot make a ``torch.device`` for every peer.
    """

    type: str
    """Device type: ``cpu``, ``cuda``, ``npu``, …"""
    index: int | None = None
    """Number of the accelerator among those that the rank sees; None for the CPU."""

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def resolve_devices(flags: Mapping[int, str], everyone: Sequence[RankInfo]) -> dict[int, DeviceName]:
    """Device of each rank of ``flags``. A flag without a number takes the accelerator that the fewest earlier ranks use, the lowest number among equals.

    Args:
        flags: ``cpu``, ``cuda``, ``cuda:1``, … of each rank; ``auto`` is the accelerator if torch has one on the node, otherwise the CPU.
        everyone: all started ranks.

    Raises:
        UserError: torch has no such device on a rank's node.
    """
    devices = {rank: _named_device(flag, everyone[rank]) for rank, flag in flags.items()}
    used = Counter(
        device_memory(everyone[rank], device) for rank, device in devices.items() if device.index is not None
    )
    for rank, device in devices.items():
        info = everyone[rank]
        if device.type != "cpu" and device.index is None:
            choices = [DeviceName(device.type, number) for number in range(info.num_accelerators)]
            devices[rank] = min(choices, key=lambda choice, info=info: used[device_memory(info, choice)])
            used[device_memory(info, devices[rank])] += 1
    return devices


def _named_device(flag: str, info: RankInfo) -> DeviceName:
    """Device of a rank as far as ``flag`` names it: an accelerator without a number has the index None."""
    kind, _, number = flag.partition(":")
    if kind == "auto":
        kind = info.accelerator or "cpu"
    if kind == "cpu":
        return DeviceName("cpu")
    if kind != info.accelerator or (number and not number.isdigit()) or int(number or 0) >= info.num_accelerators:
        here = f"cpu and {info.num_accelerators} x {info.accelerator}" if info.accelerator else "only cpu"
        raise UserError(
            f"--device {flag}: torch {info.torch_version} of rank {info.rank} on {info.node} supports {here}"
        )
    return DeviceName(kind, int(number) if number else None)


def torch_device(name: DeviceName) -> torch.device:
    """``torch.device`` of a device of this rank. Torch may not know the device types of other ranks."""
    return torch.device(str(name))


def use_device(name: DeviceName) -> torch.device:
    """``torch.device`` of this rank's device, which becomes the thread's current device.

    Torch's operations, process groups and libraries of vendors use the current device wherever a call names no index. Without this
    call the current device is accelerator 0 on every rank.
    """
    device = torch_device(name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def device_memory(info: RankInfo, device: DeviceName) -> Hashable:
    """Identifier of the memory of a rank's device; equal for ranks that share the memory."""
    return info.memory if device.type == "cpu" else (info.node, device.type, _accelerator_id(info, device))


def _accelerator_id(info: RankInfo, device: DeviceName) -> str:
    return info.accelerator_ids[device.index] if info.accelerator_ids else str(device.index)


def carrier(devices: Mapping[int, DeviceName], everyone: Sequence[RankInfo]) -> str:
    """Device type whose communication library can connect all ranks of ``devices``; ``cpu`` if tensors must go through host memory.

    Libraries of vendors (such as NCCL) require one device type, and a separate device for each rank.

    Args:
        devices: device of each rank.
        everyone: all started ranks.
    """
    types = {device.type for device in devices.values()}
    separate = {device_memory(everyone[rank], device) for rank, device in devices.items()}
    return types.pop() if len(types) == 1 and len(separate) == len(devices) > 1 else "cpu"


def num_sharing(rank: int, devices: Mapping[int, DeviceName], everyone: Sequence[RankInfo]) -> int:
    """Number of ranks of ``devices`` that share the memory of ``rank``'s device, including ``rank``."""
    memories = {other: device_memory(everyone[other], device) for other, device in devices.items()}
    return sum(memory == memories[rank] for memory in memories.values())


def machine_names(devices: Mapping[int, DeviceName], everyone: Sequence[RankInfo]) -> list[str]:
    """Name of the machine of each rank for the planner: its node, or ``node/type`` where the ranks of a node use several device types,
    whose costs differ. A rank without a device is on the machine named by its node."""
    types: dict[str, set[str]] = {}
    for rank, device in devices.items():
        types.setdefault(everyone[rank].node, set()).add(device.type)
    nodes = [info.node for info in everyone]
    has_type = [rank in devices and len(types[node]) > 1 for rank, node in enumerate(nodes)]
    return [f"{node}/{devices[rank].type}" if has_type[rank] else node for rank, node in enumerate(nodes)]
