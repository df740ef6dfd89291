"""``Device``: description of a type of device, also for ranks whose torch does not know the type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labinfer.weights.codes import QuantLayout


def no_energy_counter(device: torch.device) -> Callable[[], float]:
    """``Device.open_energy_counter`` of device types without one.

    Raises:
        OSError: always.
    """
    raise OSError(f"no provider reads the energy of device type {device.type}")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Properties of a type of device, equal on every rank; ``Provider.device`` of the provider that describes it.

    Every rank reads them for the devices of all ranks. A rank of another device lacks the vendor's packages, so the provider's module
    imports these only in ``Provider.prepare``.
    """

    type: str
    """torch's name of the device type, such as ``npu``."""
    collectives: str = ""
    """Backend of torch.distributed between devices of this type, such as ``hccl``; empty for the one that is registered with torch."""
    block_size: int = 16
    """Tokens per KV block unless ``--block-size`` is given. A run takes the largest size among its devices."""
    captures: Callable[[int], bool] = lambda tp_size: False
    """Whether ``Provider.capture`` captures the steps of a stage of ``tp_size`` ranks, which use collectives if ``tp_size`` is more than 1."""
    multiplies: Callable[[QuantLayout], bool] = lambda form: False
    """Whether functions multiply a checkpoint's quantized weights (GPTQ, AWQ, FP8, GGUF …) in the given form directly. Weights in
    other forms are dequantized while they are loaded."""
    open_energy_counter: Callable[[torch.device], Callable[[], float]] = no_energy_counter
    """Opens the energy counter of a device of this rank: a function that returns joules since an arbitrary time, and never decreases. Any
    thread may call it, also while a step runs. Both functions may raise an exception, which says why the energy cannot be read."""
