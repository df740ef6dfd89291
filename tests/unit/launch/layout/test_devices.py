"""Devices of a layout's ranks, of which this process's torch may not know the types."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.devices import DeviceName
from labinfer.comm.spmd.machine import RankInfo, describe_rank
from labinfer.launch.layout.layout import Layout, make_layout
from labinfer.models.registry import load_config

DEMO = load_config(Path(labinfer.__file__).parent / "assets" / "demo")


def host(rank: int, accelerator: str = "", count: int = 0, node: str = "", local_rank: int = 0) -> RankInfo:
    """Rank on a machine with ``count`` accelerators."""
    info = describe_rank(rank, local_rank, node or f"host-{rank}")
    return msgspec.structs.replace(info, accelerator=accelerator, num_accelerators=count)


def layout_of(everyone: list[RankInfo], **options) -> Layout:
    return make_layout(EngineOptions.from_flat(options), DEMO, everyone)


def test_hosts_with_unlike_accelerators_form_one_pipeline():
    hosts = [host(0, "npu", 2), host(1, "musa", 1), host(2)]
    with pytest.raises(RuntimeError):
        torch.device("npu:0")  # this process has no plugin of torch, as a CPU host in such a pipeline
    layouts = [
        layout_of(hosts, pipeline_parallel_size=3, device=device)
        for device in ("auto", "npu,musa,cpu", "npu:0,musa:0,cpu")
    ]
    names = {0: "npu:0", 1: "musa:0", 2: "cpu"}
    assert all({rank: str(name) for rank, name in layout.devices.items()} == names for layout in layouts)
    assert all(layouts[0].weight_bytes(place) > 0 for place in layouts[0].topology.places)
    assert not layouts[0].is_one_cpu_host


def test_ranks_of_a_node_take_its_accelerators_round_robin():
    ranks = [host(rank, "npu", 2, "host", rank) for rank in range(4)]
    layout = layout_of(ranks, pipeline_parallel_size=4)
    assert [layout.devices[rank] for rank in range(4)] == [DeviceName("npu", rank % 2) for rank in range(4)]


@pytest.mark.parametrize(
    ("device", "complaint"),
    [
        ("npu", r"^--device npu: torch \S+ of rank 1 on host-1 supports only cpu$"),
        ("npu:2,cpu", r"^--device npu:2: torch \S+ of rank 0 on host-0 supports cpu and 2 x npu$"),
        ("npu:x,cpu", r"^--device npu:x: torch \S+ of rank 0 on host-0 supports"),
    ],
)
def test_missing_device_is_refused_with_its_rank(device, complaint):
    with pytest.raises(UserError, match=complaint):
        layout_of([host(0, "npu", 2), host(1)], pipeline_parallel_size=2, device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 5}, "5 tensor-parallel ranks have other bits than one rank's; give at most -tp 4"),
        ({"tensor_parallel_size": 5, "device": "npu"}, r"kernels on npu \(rank 0\) may depend on the batch"),
    ],
)
def test_layouts_without_reproducible_bits_are_refused(options, message):
    hosts = [host(rank, "npu", 5, "host", rank) for rank in range(5)]
    options = {"device": "cpu"} | options
    with pytest.raises(UserError, match=message):
        layout_of(hosts, reproducible=True, **options)
    layout_of(hosts, **options)
    layout_of(hosts[:4], reproducible=True, device="cpu", tensor_parallel_size=4)
    layout_of(hosts, reproducible=True, device="cpu", tensor_parallel_size=(4, 1))
