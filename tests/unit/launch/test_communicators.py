"""Communicators of pipelines with accelerators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labinfer.comm.spmd.devices import DeviceName, carrier, device_memory, machine_names, num_sharing, resolve_devices
from labinfer.comm.spmd.machine import RankInfo
from labinfer.comm.spmd.topology import Topology
from labinfer.launch.communicators import direct_links


def machine(rank: int, node: str = "host", ids: str = "01", accelerator: str = "npu") -> RankInfo:
    """Rank that sees the accelerators of ``ids``, one for each letter."""
    return RankInfo(
        rank=rank,
        local_rank=rank,
        node=node,
        cores=[[0]],
        num_cpus=1,
        cpu_limit=1.0,
        accelerator=accelerator,
        num_accelerators=len(ids),
        accelerator_ids=list(ids),
        torch_version="2.13",
    )


def layout_of(devices: list[str], everyone: list[RankInfo], tp_sizes: tuple[int, ...] = ()) -> SimpleNamespace:
    names = resolve_devices(dict(enumerate(devices)), everyone)
    return SimpleNamespace(
        topology=Topology(tp_sizes or (1,) * len(devices), ((0, 1),) * len(tp_sizes or devices)),
        devices=names,
        memory=lambda rank, everyone: device_memory(everyone[rank], names[rank]),
        carrier=lambda ranks, everyone: carrier({rank: names[rank] for rank in ranks}, everyone),
    )


@pytest.mark.parametrize(
    ("devices", "tp_sizes", "links"),
    [
        (["npu:0", "npu:1"], (), {"npu": [0, 1]}),
        (["npu:0", "npu:1", "cpu"], (), {"npu": [0, 1]}),  # a CPU stage changes nothing between the accelerators
        (["npu:0", "cpu", "npu:1"], (), {}),
        (["npu:0", "npu:0", "npu:1"], (), {}),  # ranks 0 and 1 share an accelerator, which only rank 0 uses directly
        (["npu:0", "npu:1", "npu:1"], (), {"npu": [0, 1]}),
        (["npu:0", "npu:1"], (2,), {}),  # one stage sends no activations
        (["npu:0", "npu:1", "npu:2", "npu:3"], (2, 2), {"npu": [0, 1, 2, 3]}),
        (["npu:0", "npu:1", "npu:2"], (2, 1), {"npu": [0, 2]}),  # rank 1 sends none
    ],
)
def test_activations_of_neighbouring_accelerators_stay_on_them(devices, tp_sizes, links):
    everyone = [machine(rank, ids="0123") for rank in range(len(devices))]
    assert direct_links(layout_of(devices, everyone, tp_sizes), everyone) == links


def test_each_type_of_accelerators_has_links_of_its_own():
    everyone = [machine(rank, "a") for rank in range(2)] + [machine(rank, "b", accelerator="musa") for rank in (2, 3)]
    devices = ["npu:0", "npu:1", "musa:0", "musa:1"]
    assert direct_links(layout_of(devices, everyone), everyone) == {"npu": [0, 1], "musa": [2, 3]}


def test_accelerators_are_told_apart_by_their_own_identity():
    """A launcher shows each rank one accelerator, as number 0."""
    npu = DeviceName("npu", 0)
    alone = [machine(0, ids="a"), machine(1, ids="b")]
    assert carrier({0: npu, 1: npu}, alone) == "npu"
    assert device_memory(alone[0], npu) != device_memory(alone[1], npu)
    shared = [machine(0, ids="a"), machine(1, ids="a")]
    assert carrier({0: npu, 1: npu}, shared) == "cpu"
    assert device_memory(shared[0], npu) == device_memory(shared[1], npu)
    assert device_memory(shared[0], npu) != device_memory(machine(1, "other host", "a"), npu)
    assert carrier({0: npu}, alone) == "cpu"  # one rank needs no library of a vendor
    numbered = [machine(0, ids="01"), machine(1, ids="01")]
    assert carrier(resolve_devices({0: "npu", 1: "npu"}, numbered), numbered) == "npu"


@pytest.mark.parametrize(
    ("flags", "ids", "devices"),
    [
        (["npu", "npu", "npu"], "01", ["npu:0", "npu:1", "npu:0"]),
        (["npu", "cpu", "npu"], "01", ["npu:0", "cpu", "npu:1"]),  # a CPU rank takes no accelerator
        (["auto", "npu:0", "auto"], "012", ["npu:1", "npu:0", "npu:2"]),
        (["npu", "cpu", "cpu"], "0", ["npu:0", "cpu", "cpu"]),
    ],
)
def test_ranks_take_the_accelerators_that_are_least_used(flags, ids, devices):
    everyone = [machine(rank, ids=ids) for rank in range(len(flags))]
    assert [str(device) for device in resolve_devices(dict(enumerate(flags)), everyone).values()] == devices


def test_node_with_ranks_on_unlike_devices_is_a_machine_for_each_type():
    everyone = [machine(rank, "a") for rank in range(3)] + [machine(rank, "b") for rank in (3, 4)]
    mixed = resolve_devices(dict(enumerate(["npu", "cpu", "cpu", "npu", "npu"])), everyone)
    assert machine_names(mixed, everyone) == ["a/npu", "a/cpu", "a/cpu", "b", "b"]
    assert machine_names({0: mixed[0], 1: mixed[1]}, everyone) == ["a/npu", "a/cpu", "a", "b", "b"]
    assert [num_sharing(rank, mixed, everyone) for rank in mixed] == [1, 2, 2, 1, 1]
