"""The device of this rank."""

from __future__ import annotations

import torch

from labinfer.comm.spmd.accelerator import use_device
from labinfer.comm.spmd.devices import DeviceName


def test_own_accelerator_becomes_the_current_device(monkeypatch):
    indices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    assert use_device(DeviceName("cpu")) == torch.device("cpu") and not indices
    assert use_device(DeviceName("cuda", 1)) == torch.device("cuda:1") and indices == [1]
