"""Accelerators of this rank's machine, as torch and the module of their type (``torch.cuda``, ``torch.npu``, …) describe them.

``torch.accelerator`` has memory figures of a device only if the device's plugin implements them. Otherwise the module of the device
type has them, under the names of ``torch.cuda``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from labinfer.comm.spmd.environment import visible_devices

NO_ALLOCATOR = "is not a DeviceAllocator"
"""Part of torch's RuntimeError for a device type whose plugin has no memory figures for ``torch.accelerator``."""


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Free and total bytes of an accelerator; None if torch does not report them."""
    return _ask(device, "get_memory_info", "mem_get_info")


def memory_reserved(device: torch.device) -> int:
    """Bytes of an accelerator that this process has reserved; 0 if torch does not report them."""
    return _ask(device, "memory_reserved", "memory_reserved") or 0


def max_memory_allocated(device: torch.device) -> int:
    """Peak of the bytes that this process allocated on an accelerator; 0 if torch does not report it."""
    return _ask(device, "max_memory_allocated", "max_memory_allocated") or 0


def hardware_name(device: torch.device) -> str:
    """Product name of an accelerator, such as ``NVIDIA H200``; its type if torch does not report the name."""
    module = getattr(torch, device.type, None)
    with suppress(RuntimeError, AttributeError):
        return str(module.get_device_name(device.index))
    with suppress(RuntimeError, AttributeError):
        return str(module.get_device_properties(device.index).name)
    return device.type


def accelerator_ids(device_type: str, count: int) -> list[str]:
    """Identifier of each accelerator, equal on all ranks of a machine that see it.

    A launcher may show each rank a different accelerator, as number 0 each time. The identifier is the UUID, else the entry of the
    variable that makes accelerators visible, else the number.
    """
    module = getattr(torch, device_type, None)
    ids: list[str] = []
    with suppress(RuntimeError, AttributeError):
        ids = [str(module.get_device_properties(number).uuid) for number in range(count)]
    if ids and len(set(ids)) == count and all(any(digit not in "0-" for digit in each) for each in ids):
        return ids
    visible = visible_devices(device_type)
    return visible[:count] if len(visible) >= count else [str(number) for number in range(count)]


def empty_cache() -> None:
    """Return cached memory of the current accelerator to the system, if torch can."""
    if torch.accelerator.is_available():
        _ask(torch.accelerator.current_accelerator(), "empty_cache", "empty_cache")


def _ask(device: torch.device, of_torch: str, of_module: str) -> Any | None:
    """Result of function ``of_torch`` of ``torch.accelerator``, or else of ``of_module`` of the device type's module; None if neither exists.

    Raises:
        RuntimeError: the device has failed: both functions raise it, or one raises it and the other does not exist.
    """
    arguments = () if device.index is None else (device.index,)
    failure: RuntimeError | None = None
    for owner, name in ((torch.accelerator, of_torch), (getattr(torch, device.type, None), of_module)):
        try:
            return getattr(owner, name)(*arguments)
        except (AttributeError, NotImplementedError):
            continue
        except RuntimeError as error:
            if NO_ALLOCATOR not in str(error):
                failure = failure or error
    if failure is not None:
        raise failure
    return None
