"""This rank's own device."""

from __future__ import annotations

import torch

from labinfer.comm.spmd.devices import DeviceName


def torch_device(name: DeviceName) -> torch.device:
    """``torch.device`` of a device of this rank. Torch may not know the device types of other ranks."""
    return torch.device(str(name))


def use_device(name: DeviceName) -> torch.device:
    """``torch.device`` of this rank's device, which becomes the thread's current device.

    Torch's operations, process groups and libraries of vendors use the current device wherever a call names no index. Without this call
    that is accelerator 0 on every rank.
    """
    device = torch_device(name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device
