"""Energy of GPUs by a stand-in for NVML's library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from labinfer.functions.cuda.nvml import driver_version, open_energy_counter

CARD = torch.device("cuda", 1)


class ErrorString:
    """``nvmlErrorString``, whose type of result is set."""

    restype = None

    def __call__(self, status: int) -> bytes:
        assert self.restype is ctypes.c_char_p
        return {3: b"Not Supported", 6: b"Not Found"}[status]


class Nvml:
    """The functions of NVML that are called, for one GPU. ``fails`` names one that returns an error."""

    def __init__(self, fails: str = ""):
        self.fails, self.millijoules, self.asked = fails, 7_500, b""
        self.nvmlErrorString = ErrorString()

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, text, size: int) -> int:
        assert len(text) == size
        text.value = b"570.86.15"
        return 3 if self.fails == "nvmlSystemGetDriverVersion" else 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle) -> int:
        self.asked = uuid
        handle._obj.value = 42
        return 6 if self.fails == "nvmlDeviceGetHandleByUUID" else 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, millijoules) -> int:
        assert handle.value == 42 and isinstance(millijoules._obj, ctypes.c_ulonglong)
        millijoules._obj.value = self.millijoules
        return 3 if self.fails == "nvmlDeviceGetTotalEnergyConsumption" else 0


@pytest.fixture(autouse=True)
def card(monkeypatch):
    described = {CARD: SimpleNamespace(uuid="1f2e")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", described.__getitem__)


def test_energy_is_that_of_the_card_with_this_uuid():
    nvml = Nvml()
    read = open_energy_counter(CARD, lambda name: nvml)
    assert nvml.asked == b"GPU-1f2e" and read() == 7.5
    nvml.millijoules += 250
    assert read() == 7.75


@pytest.mark.parametrize(
    ("name", "text"),
    [("nvmlDeviceGetHandleByUUID", "Not Found"), ("nvmlDeviceGetTotalEnergyConsumption", "Not Supported")],
)
def test_error_of_the_driver_names_the_call(name, text):
    nvml = Nvml(fails=name)
    with pytest.raises(OSError, match=f"^{name}: {text}$"):
        open_energy_counter(CARD, lambda name: nvml)


def test_host_without_the_driver_names_its_library():
    with pytest.raises(OSError, match="libnvidia-ml"):
        open_energy_counter(CARD, lambda name: ctypes.CDLL(f"{name}.missing"))


def test_driver_has_a_version_where_nvml_tells_it():
    def missing(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    assert driver_version(lambda name: Nvml()) == "570.86.15"
    assert driver_version(lambda name: Nvml("nvmlSystemGetDriverVersion")) == driver_version(missing) == ""
