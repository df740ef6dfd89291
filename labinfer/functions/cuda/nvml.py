"""NVML: energy of NVIDIA GPUs, through the driver's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def open_energy_counter(device: torch.device, load: Callable[[str], Any] = ctypes.CDLL) -> Callable[[], float]:
    """Open the energy counter of a whole GPU, its memory included: a function that returns joules since the driver was loaded.

    Args:
        load: loads a library by its name.

    Raises:
        OSError: the driver's library is missing, or NVML does not know the GPU or its energy (before Volta; a MIG instance).
    """
    nvml = load("libnvidia-ml.so.1")
    nvml.nvmlErrorString.restype = ctypes.c_char_p

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(nvml, name)(*arguments):
            raise OSError(f"{name}: {nvml.nvmlErrorString(status).decode()}")

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    handle = ctypes.c_void_p()
    call("nvmlInit_v2")
    # torch's number of a GPU is not NVML's where CUDA_VISIBLE_DEVICES hides some
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    read()
    return read
