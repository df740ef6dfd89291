"""NVML: energy of NVIDIA GPUs and the version of their driver, through the driver's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

VERSION_BYTES = 80
"""Bytes that NVML needs at most for the driver's version."""


def open_energy_counter(device: torch.device, load: Callable[[str], Any] = ctypes.CDLL) -> Callable[[], float]:
    """Open the energy counter of a whole GPU, its memory included: a function that returns joules since the driver was loaded.

    Args:
        load: loads a library by its name.

    Raises:
        OSError: the driver's library is missing, or NVML does not know the GPU or its energy (before Volta; a MIG instance).
    """
    call = _open(load)

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    handle = ctypes.c_void_p()
    # torch and NVML number GPUs differently if CUDA_VISIBLE_DEVICES hides some
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    read()
    return read


def driver_version(load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Version of the NVIDIA driver, such as ``570.86.15``; empty if NVML is missing or does not report it, as on GPUs of other vendors.

    Args:
        load: loads a library by its name.
    """
    text = ctypes.create_string_buffer(VERSION_BYTES)
    try:
        _open(load)("nvmlSystemGetDriverVersion", text, VERSION_BYTES)
    except OSError:
        return ""
    return text.value.decode()


def _open(load: Callable[[str], Any]) -> Callable[..., None]:
    """Initialize NVML. Returns a function that calls an NVML function by its name, and raises an OSError if the call fails.

    Raises:
        OSError: the library is missing or fails.
    """
    nvml = load("libnvidia-ml.so.1")
    nvml.nvmlErrorString.restype = ctypes.c_char_p

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(nvml, name)(*arguments):
            raise OSError(f"{name}: {nvml.nvmlErrorString(status).decode()}")

    call("nvmlInit_v2")
    return call
