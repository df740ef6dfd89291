"""Options of a layout that is asked for while another is served."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from labinfer.base.config import EngineOptions, ParallelOptions
from labinfer.base.errors import UserError
from labinfer.cli.commands.changed_layout import changed_options, check_devices, kept_machines
from labinfer.cli.commands.hosting import WORTH_SECONDS, Hosting
from labinfer.comm.spmd.devices import DeviceName
from labinfer.planner.saved_plan import SavedPlan, SavedStage
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.link.layout_change import LayoutChange
from labinfer.server.link.stats import Drift

STAGE = SavedStage(machine="node", layers=6, tp_size=1, dtype="bfloat16", quantization="none")


def changed(before: dict[str, Any], change: dict[str, Any], num_ranks: int) -> EngineOptions:
    return changed_options(EngineOptions.from_flat(before), LayoutChange(**change), ["node"] * num_ranks)


@pytest.mark.parametrize(
    ("before", "change", "num_ranks", "after"),
    [
        ({"pipeline_parallel_size": 2}, {"layers": [2, 4]}, 2, {"layers": (2, 4)}),
        ({"tensor_parallel_size": 2}, {"layers": [2, 4]}, 2, {"layers": (2, 4)}),
        ({"layers": [2, 4]}, {"tensor_parallel_size": [2]}, 2, {"tensor_parallel_size": (2,)}),
        ({"layers": [2, 4]}, {"ranks": [0]}, 2, {"ranks": (0,)}),
        ({"ranks": [0, 2]}, {"layers": [3, 3]}, 3, {"layers": (3, 3), "ranks": (0, 2)}),
        ({}, {"tensor_parallel_size": [1, 1]}, 3, {"tensor_parallel_size": (1, 1), "ranks": (0, 1)}),
        ({"ranks": [0]}, {"tensor_parallel_size": [2, 1]}, 3, {"tensor_parallel_size": (2, 1)}),
    ],
)
def test_stages_are_described_as_by_flags_at_a_start(before, change, num_ranks, after):
    options = changed(before, change, num_ranks)
    assert options == replace(EngineOptions.from_flat(before), parallel=ParallelOptions(**after))


def test_precision_changes_alone():
    before = {"layers": [2, 4], "dtype": ["bfloat16", "float32"]}
    options = changed(before, {"quantization": "int8"}, 2)
    assert options == EngineOptions.from_flat(before | {"quantization": "int8"})
    options = changed(before, {"quantization": ["none", "int8"]}, 2)
    assert options == EngineOptions.from_flat(before | {"quantization": "none,int8"})
    options = changed(before | {"quantization": "int8,none"}, {"quantization": ["int8"]}, 2)
    assert options == EngineOptions.from_flat(before | {"quantization": "int8"})
    in_groups = before | {"quantization": "int4", "quantization_group_size": 32}
    options = changed(in_groups, {"quantization": ["int8"]}, 2)  # there may be a change back
    assert (options.model.quantization, options.model.quantization_group_size) == (("int8",), 32)
    options = changed(before, {"dtype": ["float16"]}, 2)
    assert options == EngineOptions.from_flat(before | {"dtype": "float16"})


def test_plan_says_all():
    stages = [
        SavedStage(machine="node", layers=layers, tp_size=1, dtype=dtype, quantization=quantization)
        for layers, dtype, quantization in ((4, "bfloat16", "none"), (2, "float32", "int8"))
    ]
    plan = SavedPlan(model="digest", stages=stages)
    options = changed({}, {"plan": plan}, 3)
    assert (options.parallel.layers, options.parallel.ranks) == ((4, 2), (0, 1))
    assert (options.model.dtype, options.model.quantization) == (("bfloat16", "float32"), ("none", "int8"))
    with pytest.raises(UserError, match="plan already determines all other fields"):
        changed({}, {"plan": plan, "layers": [4, 2]}, 3)


NPU, CPU = DeviceName("npu", 0), DeviceName("cpu")


def plan_of(*machines: str, tp_size: int = 1) -> SavedPlan:
    stages = [msgspec.structs.replace(STAGE, machine=machine, layers=3, tp_size=tp_size) for machine in machines]
    return SavedPlan(model="digest", stages=stages)


@pytest.mark.parametrize(
    ("device", "devices", "plan", "ranks", "after"),
    [
        (("npu", "cpu"), {0: NPU, 1: CPU}, ["a/npu", "a/cpu"], (), ("npu:0", "cpu")),
        (("npu", "cpu"), {0: NPU, 1: CPU}, ["a/npu"], (0,), ("npu:0",)),
        (("npu:0", "cpu", "cpu"), {0: NPU, 2: CPU, 1: CPU}, ["a/npu", "a/cpu", "a/cpu"], (), ("npu:0", "cpu", "cpu")),
        (("npu", "cpu"), {0: NPU, 2: CPU}, ["a/npu", "a/cpu"], (0, 2), ("npu:0", "cpu")),
        (("cpu", "npu"), {0: CPU, 1: NPU}, ["a"], (0,), ("cpu",)),
        (("npu",), {0: NPU}, ["a", "a"], (), ("npu",)),
    ],
)
def test_ranks_of_a_plan_keep_their_devices(device, devices, plan, ranks, after):
    everyone = [SimpleNamespace(node="a")] * max(len(plan), 1 + max(devices))
    before = EngineOptions.from_flat({"device": device})
    machines, names = kept_machines(plan_of(*plan), before, devices, everyone)
    parallel = changed_options(before, LayoutChange(plan=plan_of(*plan)), machines, names).parallel
    assert (parallel.ranks, parallel.device) == (ranks, after)


@pytest.mark.parametrize(
    ("device", "devices", "plan", "message"),
    [
        (("npu",), {0: NPU, 1: NPU}, ["a/npu", "a/cpu"], "stage on a/npu, but no rank on a runs on npu, and a layout"),
        (("npu", "cpu"), {0: NPU, 1: CPU}, ["a/npu", "a/musa"], "a/musa, but no rank on a runs on musa, and a layout"),
        (("npu", "cpu"), {0: NPU, 1: CPU}, ["a/npu", "b"], "the plan has a stage on b, but ranks run only on a/npu, a"),
        (("npu", "cpu"), {0: NPU, 2: CPU}, ["a", "a", "a"], "the plan needs 3 ranks on a, which has 2"),
    ],
)
def test_plan_for_devices_that_no_rank_has_is_refused(device, devices, plan, message):
    everyone = [SimpleNamespace(node="a")] * 3
    before = EngineOptions.from_flat({"device": device})
    with pytest.raises(UserError, match=message):
        machines, names = kept_machines(plan_of(*plan), before, devices, everyone)
        changed_options(before, LayoutChange(plan=plan_of(*plan)), machines, names)


def test_rank_that_would_leave_its_device_is_refused():
    before = SimpleNamespace(all_devices={0: NPU, 1: CPU})
    check_devices(before, SimpleNamespace(devices={0: DeviceName("npu", 1), 2: CPU}))
    with pytest.raises(
        UserError, match="puts rank 1 on npu:1, but it runs on cpu, and a layout change keeps the device"
    ):
        check_devices(before, SimpleNamespace(devices={0: NPU, 1: DeviceName("npu", 1)}))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [4, 2]},
        {"quantization": "int8"},
        {"plan": SavedPlan(model="digest", stages=[STAGE], num_blocks=3)},
    ],
)
def test_kv_blocks_of_the_plan_of_a_start_are_not_those_of_another_layout(change):
    before = replace(EngineOptions(), planned_blocks=7)
    assert changed_options(before, LayoutChange(model="demo", **change), ["node"] * 2).planned_blocks == 0


def test_address_is_told_once_by_whichever_host_hears_that_requests_are_taken():
    told: list[str] = []
    session = SimpleNamespace(group=None, plan_text="", environment=SimpleNamespace(supervisor=None))
    hosting = Hosting(session, {}, None, ServerOptions(), lambda: told.append("address"))
    for _ in range(2):
        hosting._tell_ready()
    assert told == ["address"]


def test_values_that_do_not_go_together_are_refused():
    for quantization in ("int8", ["none", "int8"]):
        with pytest.raises(UserError, match="packed12"):
            changed({"weights": "packed12"}, {"quantization": quantization}, 2)


@pytest.mark.parametrize("ranks", [(), (2, 1, 0)])
def test_better_split_changes_layers_and_context_alone_and_has_to_be_worth_the_pause(ranks):
    options = EngineOptions.from_flat(
        {"tensor_parallel_size": (2, 1), "layers": (3, 3), "ranks": ranks or None, "dtype": "float32"}
    )
    group = SimpleNamespace(everyone=[SimpleNamespace(node="node")] * 3)
    hosting = Hosting(
        SimpleNamespace(group=group, plan_text=""), {"demo": options}, None, ServerOptions(), lambda: None
    )
    topology = SimpleNamespace(tp_sizes=(2, 1))
    served = SimpleNamespace(layout=SimpleNamespace(topology=topology), spec=SimpleNamespace(max_model_len=64))
    hosting.llms, hosting._load_seconds = {"demo": served}, 0.1 * WORTH_SECONDS
    drift = Drift(factors=[1.0, 2.0], slow=1, rank=2, layers=[4, 2], gain=0.2)
    layouts = hosting._plan_split("demo", drift)
    parallel = replace(options.parallel, layers=(4, 2))
    assert layouts == {"demo": replace(options, parallel=parallel, model=replace(options.model, max_model_len=64))}
    assert hosting._plan_split("demo", msgspec.structs.replace(drift, gain=0.09)) is None
    hosting._failed.append(layouts)
    assert hosting._plan_split("demo", drift) is None
