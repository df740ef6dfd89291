"""``--quantization`` of each stage in a layout."""

from __future__ import annotations

from pathlib import Path

import pytest

import labinfer
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.machine import describe_rank
from labinfer.launch.layout.layout import Layout, make_layout
from labinfer.models.registry import load_config

DEMO = load_config(Path(labinfer.__file__).parent / "assets" / "demo")


def two_stages(quantization: str, **options) -> Layout:
    flat = {"pipeline_parallel_size": 2, "device": "cpu", "quantization": quantization} | options
    return make_layout(EngineOptions.from_flat(flat), DEMO, [describe_rank(rank, rank, "node") for rank in range(2)])


def facts(layout: Layout) -> list[tuple[str, str, int]]:
    return [
        (layout.rounding(place), layout.quantization_name(place), layout.weight_bytes(place))
        for place in layout.topology.places
    ]


def test_each_stage_has_its_own():
    plain, rounded = facts(two_stages("none")), facts(two_stages("int8"))
    assert facts(two_stages("none,int8")) == [plain[0], rounded[1]]
    assert facts(two_stages("int8,auto")) == [rounded[0], plain[1]]
    assert [name for _, name, _ in (*plain, *rounded)] == ["none", "none", "int8", "int8"]
    assert all(few < 0.6 * many for (_, _, many), (_, _, few) in zip(plain, rounded, strict=True))


def test_number_of_values_is_that_of_the_stages():
    with pytest.raises(
        UserError, match="--quantization none,int8,none has 3 values for 2 stages; give one, or one per"
    ):
        two_stages("none,int8,none")
