"""Which rank reads which energy counter: each one of a host or an accelerator is read once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from powercap_tree import make_zone, set_joules

from labinfer.comm.spmd.devices import DeviceName, device_memory
from labinfer.comm.spmd.machine import RankInfo
from labinfer.functions.device import Device
from labinfer.launch import energy_counters
from labinfer.launch.energy_counters import open_energy_meter

CPU, CARD, OTHER_CARD = DeviceName("cpu"), DeviceName("cuda", 0), DeviceName("cuda", 1)


def open_all(nodes: str, devices: dict[int, DeviceName], powercap) -> dict[int, energy_counters.EnergyMeter]:
    """The meters of all placed ranks. ``nodes`` has a letter for each started rank."""
    everyone = [
        RankInfo(
            rank=rank,
            local_rank=0,
            node=node,
            cores=[],
            num_cpus=1,
            cpu_limit=1.0,
            accelerator="cuda",
            num_accelerators=2,
            torch_version="",
        )
        for rank, node in enumerate(nodes)
    ]
    layout = SimpleNamespace(
        devices=devices, memory=lambda rank, everyone: device_memory(everyone[rank], devices[rank])
    )
    return {rank: open_energy_meter(layout, rank, everyone, powercap) for rank in devices}


def test_packages_of_a_host_are_read_by_its_first_placed_rank(tmp_path):
    zone = make_zone(tmp_path, "intel-rapl:0", "package-0", 1.0)
    meters = open_all("aabba", {4: CPU, 3: CPU, 2: CPU, 1: CPU}, tmp_path)  # rank 0 is spare
    set_joules(zone, 3.0)
    assert {rank: meter.read() for rank, meter in meters.items()} == {
        1: {"package-0": pytest.approx(2.0)},
        2: {"package-0": pytest.approx(2.0)},
        3: {},
        4: {},
    }
    assert not any(meter.missing for meter in meters.values())


def test_only_the_rank_that_would_read_says_what_is_missing(tmp_path):
    meters = open_all("ab", {0: CPU, 1: CPU}, tmp_path) | {2: open_all("aaa", {0: CPU, 2: CPU}, tmp_path)[2]}
    reason = f"no CPU package in {tmp_path}"
    assert {rank: meter.missing for rank, meter in meters.items()} == {0: [reason], 1: [reason], 2: []}


def test_card_is_read_by_the_first_of_its_ranks(tmp_path, monkeypatch):
    opened = []

    def open_counter(device):
        opened.append(str(device))
        return iter(range(10, 100, 10)).__next__

    described = Device(type="cuda", open_energy_counter=open_counter)
    monkeypatch.setattr(energy_counters, "describe_device", lambda device_type: described)
    make_zone(tmp_path, "intel-rapl:0", "package-0", 1.0)
    meters = open_all("aaab", {0: CARD, 1: OTHER_CARD, 2: CARD, 3: CARD}, tmp_path)
    assert opened == ["cuda:0", "cuda:1", "cuda:0"]
    assert {rank: meter.read() for rank, meter in meters.items()} == {
        0: {"package-0": 0.0, "cuda:0": 10},
        1: {"cuda:1": 10},
        2: {},
        3: {"package-0": 0.0, "cuda:0": 10},
    }


@pytest.mark.parametrize("error", [OSError("no energy on this card"), KeyError("a plugin's mistake")])
def test_card_that_cannot_be_read_is_named_and_stops_nothing(error, tmp_path, monkeypatch):
    def fail(device):
        raise error

    monkeypatch.setattr(
        energy_counters, "describe_device", lambda device_type: Device(type="cuda", open_energy_counter=fail)
    )
    make_zone(tmp_path, "intel-rapl:0", "package-0", 1.0)
    meter = open_all("a", {0: CARD}, tmp_path)[0]
    assert meter.missing == [f"cuda:0: {error}"] and set(meter.read()) == {"package-0"}


def test_device_type_without_a_counter_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(energy_counters, "describe_device", lambda device_type: Device(type="cuda"))
    make_zone(tmp_path, "intel-rapl:0", "package-0", 1.0)
    assert open_all("a", {0: CARD}, tmp_path)[0].missing == ["cuda:0: no provider reads the energy of device type cuda"]
