"""Accelerators as torch and the modules of their types describe them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.comm.spmd import accelerator
from labinfer.comm.spmd.devices import DeviceName, use_device
from labinfer.comm.spmd.machine import UNKNOWN_BYTES, free_memory, peak_memory, total_memory, used_memory

CARD = torch.device("cuda", 1)


def refuse(*_):
    raise NotImplementedError("no such figure")


@pytest.fixture
def module(monkeypatch) -> SimpleNamespace:
    """The module ``torch.cuda`` of a plugin that adds no memory figures to ``torch.accelerator``."""
    for name in ("get_memory_info", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, refuse, raising=False)
    module = SimpleNamespace()
    monkeypatch.setattr(torch, "cuda", module)
    return module


def test_own_accelerator_becomes_the_current_device(monkeypatch):
    indices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    assert use_device(DeviceName("cpu")) == torch.device("cpu") and not indices
    assert use_device(DeviceName("cuda", 1)) == CARD and indices == [1]


def test_memory_figures_come_from_the_module_of_the_type(module):
    module.mem_get_info = lambda index: (10 + index, 20 + index)
    module.memory_reserved = lambda index: 5 + index
    module.max_memory_allocated = lambda index: 7 + index
    assert (free_memory(CARD), total_memory(CARD), used_memory(CARD, 21)) == (11, 21, 6)
    assert peak_memory(CARD) >= 8


def test_unknown_memory_is_refused_without_a_number_of_blocks(module):
    for call in (None, refuse):
        if call is not None:
            module.mem_get_info = call
        with pytest.raises(
            UserError, match=r"^torch does not tell the free memory of cuda:1, .*; give --num-kv-blocks$"
        ):
            free_memory(CARD)
        assert free_memory(CARD, 100) == UNKNOWN_BYTES
        assert total_memory(CARD) == used_memory(CARD, 0) == 0


def test_failure_of_a_device_is_not_taken_for_a_missing_figure(module, monkeypatch):
    def fail(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    for own in (None, refuse, fail):
        if own is not None:
            module.mem_get_info = own
        with pytest.raises(RuntimeError, match="illegal memory access"):
            accelerator.memory_info(CARD)
    module.mem_get_info = lambda index: (10, 20)  # as torch.cuda, which initializes the device first
    assert accelerator.memory_info(CARD) == (10, 20)


def test_plugin_without_an_allocator_of_torch_has_no_figures(module, monkeypatch):
    def fail(*_):
        raise RuntimeError("Allocator for npu is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    assert accelerator.memory_info(CARD) is None


def test_identifiers_are_uuids_or_what_the_environment_names(module, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert accelerator.accelerator_ids("cuda", 2) == ["3", "5"]
    uuids = ["00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-000000000001"]
    module.get_device_properties = lambda number: SimpleNamespace(uuid=uuids[number], name="card")
    assert accelerator.accelerator_ids("cuda", 2) == ["3", "5"]  # zeros are no identifier
    uuids[0] = uuids[1]
    assert accelerator.accelerator_ids("cuda", 2) == ["3", "5"]  # nor are equal ones
    uuids[0] = "6f1c0a52-0000-0000-0000-000000000000"
    assert accelerator.accelerator_ids("cuda", 2) == uuids
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7")
    assert accelerator.accelerator_ids("npu", 1) == ["7"]
    assert accelerator.accelerator_ids("musa", 2) == ["0", "1"]


def test_hardware_is_named_by_the_module_or_by_its_type(module):
    assert accelerator.hardware_name(CARD) == "cuda"
    module.get_device_properties = lambda index: SimpleNamespace(name=f"card {index}")
    assert accelerator.hardware_name(CARD) == "card 1"
    module.get_device_name = lambda index: f"Fast card {index}"
    assert accelerator.hardware_name(CARD) == "Fast card 1"
