"""Plans from files, and the options of a group that follows one."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest
from random_clusters import make_cluster, make_problem

from labinfer.base.config import PLANNED, SECTIONS, EngineOptions
from labinfer.base.errors import UserError
from labinfer.planner.report import PlanReport
from labinfer.planner.saved_plan import (
    ROOM_OPTIONS,
    SavedPlan,
    SavedStage,
    describe_difference,
    describe_plan,
    plan_options,
    room_options,
    rounding,
)

PLAN_OPTIONS = (*PLANNED, "layout", "dtype", "quantization")
OTHER_OPTIONS = (
    *("model", "hub", "ignore_tensors", "tokenizer", "chat_template", "reranker", "response_template"),
    *("transport", "enable_prefix_caching", "prefix_cache_eviction", "snapshot_interval", "weight_cache_size"),
    *("max_queued_requests", "scheduling_policy", "batch_policy", "pipeline_schedule", "max_inflight"),
)
"""Options that change nothing of the room for a cache."""


def make_plan(*stages: tuple[str, int, int], dtypes: tuple[str, ...] = ("float32",), names=("none",)) -> SavedPlan:
    """Stages (machine, tensor-parallel degree, layers)."""
    return SavedPlan(
        model="m",
        stages=[
            SavedStage(
                machine=machine,
                tp_size=tp_size,
                layers=layers,
                dtype=dtypes[number % len(dtypes)],
                quantization=names[number % len(names)],
            )
            for number, (machine, tp_size, layers) in enumerate(stages)
        ],
    )


def test_plan_that_is_saved_is_read_and_followed(tmp_path):
    report = PlanReport.make(make_problem(make_cluster(1.0, 0.5, num_layers=24)))
    (tmp_path / "plan.json").write_bytes(report.save())
    plan = SavedPlan.read(str(tmp_path / "plan.json"))
    stages = report.best.stages
    assert len(stages) == 2
    options = EngineOptions.from_flat({"max_num_seqs": 5, "layout": "plan.json"})
    nodes = [stages[0].machine, "c", stages[1].machine]
    chosen = plan_options(plan, options, nodes)
    assert chosen.parallel.tensor_parallel_size == (1, 1) and chosen.parallel.pipeline_parallel_size == 2
    assert chosen.parallel.layers == tuple(stage.end - stage.begin for stage in stages)
    assert chosen.parallel.ranks == (0, 2) and chosen.parallel.layout == ""
    assert chosen.model.dtype == ("float32",) and chosen.model.quantization == ("none",)
    assert chosen.scheduler == options.scheduler


@pytest.mark.parametrize(
    ("plan", "nodes", "ranks"),
    [
        (make_plan(("a", 2, 3), ("b", 2, 1)), "aabb", ()),
        (make_plan(("a", 2, 3), ("b", 1, 1)), "aba", (0, 2, 1)),
        (make_plan(("a", 1, 1), ("b", 1, 2), ("a", 1, 1)), "aab", (0, 2, 1)),
        (make_plan(("a", 2, 4)), "aaab", (0, 1)),
        (make_plan(("a", 1, 4)), "a", ()),
    ],
)
def test_ranks_are_those_of_the_machines_in_the_order_of_the_stages(plan, nodes, ranks):
    assert plan_options(plan, EngineOptions(), list(nodes)).parallel.ranks == ranks


@pytest.mark.parametrize(
    ("plan", "ranks", "device"),
    [
        (make_plan(("a/npu", 1, 3), ("a/cpu", 1, 1)), (), ("npu:0", "cpu")),
        (make_plan(("a/npu", 1, 3), ("a/npu", 1, 1)), (0, 2), ("npu:0", "npu:1")),
        (make_plan(("a/npu", 2, 3), ("a/cpu", 1, 1)), (0, 2, 1), ("npu", "cpu")),
        (make_plan(("a/npu", 2, 4)), (0, 2), ("npu",)),
    ],
)
def test_stages_take_the_devices_of_their_ranks(plan, ranks, device):
    machines, devices = ["a/npu", "a/cpu", "a/npu"], ["npu:0", "cpu", "npu:1"]
    count = 2 if not ranks else 3
    given = EngineOptions.from_flat({"device": devices[:count]})
    chosen = plan_options(plan, given, machines[:count], devices[:count])
    assert (chosen.parallel.device, chosen.parallel.ranks) == (device, ranks)


@pytest.mark.parametrize(
    ("dtypes", "names", "model"),
    [
        (("float32", "bfloat16"), ("gptq + int8",), (("float32", "bfloat16"), ("int8",))),
        (("bfloat16",), ("none", "int8"), (("bfloat16",), ("none", "int8"))),
        (("float32", "bfloat16"), ("int4", "fp8"), (("float32", "bfloat16"), ("int4", "auto"))),
        (("bfloat16",), ("gptq", "fp8"), (("bfloat16",), ("auto",))),
    ],
)
def test_dtypes_and_quantizations_are_given_by_stage_where_they_differ(dtypes, names, model):
    plan = make_plan(("a", 1, 3), ("b", 1, 1), dtypes=dtypes, names=names)
    chosen = plan_options(plan, EngineOptions(), ["a", "b"])
    assert (chosen.model.dtype, chosen.model.quantization) == model


def test_description_has_layers_machines_and_spare_ranks():
    plan = make_plan(("a", 1, 3), ("b", 2, 1))
    text = "layers 0-2 on a (rank 0), layers 3-3 on b (ranks 1, 3)"
    assert describe_plan(plan, ["a", "b", "a", "b", "c"]) == f"{text}; spare: ranks 2, 4"
    assert describe_plan(plan, ["a", "b", "b"]) == "layers 0-2 on a (rank 0), layers 3-3 on b (ranks 1, 2)"


@pytest.mark.parametrize(
    ("plan", "nodes", "text"),
    [
        (make_plan(("a", 1, 3), ("c", 2, 1)), "ab", "a stage on c, but ranks run only on a, b; start 2 there"),
        (make_plan(("a", 1, 1), ("b", 1, 1), ("a", 1, 2)), "ab", "needs 2 ranks on a, which has 1; start 2 there"),
        (make_plan(("b", 1, 3), ("a", 1, 1)), "ab", "rank 0 is on a; start rank 0 on b"),
        (make_plan(("a", 1, 4), dtypes=("float13",)), "a", "--dtype float13: choose one of"),
    ],
)
def test_plan_that_cannot_be_followed_is_refused_in_one_line(plan, nodes, text):
    with pytest.raises(UserError, match=text) as error:
        plan_options(plan, EngineOptions(), list(nodes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not a plan"),
        (b"\xff", "is not a plan"),
        (b'{"machines": []}', "missing required field `model`"),
        (b'{"model": "m", "stages": []}', r"length >= 1 - at `\$.stages`"),
        (msgspec.json.encode(make_plan(("a", 0, 4))), "tp_size"),
        (msgspec.json.encode(make_plan(("a", 1, -1))), "layers"),
    ],
)
def test_file_that_is_no_plan_is_refused_by_its_name(content, text, tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(UserError, match="cannot read --layout .*plan.json: No such file"):
        SavedPlan.read(str(path))
    path.write_bytes(content)
    with pytest.raises(UserError, match=text) as error:
        SavedPlan.read(str(path))
    assert str(error.value).startswith(f"--layout {path} is not a plan: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "flag"),
    [("none", "none"), ("int8", "int8"), ("gptq", "auto"), ("fp8 + int4", "int4"), ("compressed-tensors", "auto")],
)
def test_names_of_quantizations_lead_to_the_flag(name, flag):
    assert rounding(name) == flag


def test_plan_has_the_kv_blocks_of_its_report():
    report = PlanReport.make(make_problem(make_cluster(1.0, 0.5, num_layers=24, memory=1 << 30)))
    plan = msgspec.json.decode(report.save(), type=SavedPlan)
    assert plan.num_blocks > 0 and f"KV tokens: {plan.num_tokens}\n" in report.describe()


@pytest.mark.parametrize(
    ("planned", "started", "text"),
    [
        ({}, {}, ""),
        ({"max_num_seqs": 5}, {"max_num_seqs": 5, "enable_prefix_caching": False, "threads": 3}, ""),
        ({"max_model_len": 4096}, {}, ""),
        ({"autotune": "again"}, {"weight_cache_size": 0}, ""),
        ({"max_model_len": 100}, {}, "--max-model-len 100 in the plan, 4096 here"),
        ({"max_num_seqs": 5}, {}, "--max-num-seqs 5 in the plan, 64 here"),
        ({}, {"kv_cache_dtype": "int8"}, "--kv-cache-dtype auto in the plan, int8 here"),
        ({"functions": "reference"}, {}, "--functions reference in the plan, auto here"),
        ({}, {"autotune": "off"}, "--autotune on in the plan, off here"),
        (
            {"memory_utilization": 0.5, "experts": "whole"},
            {"memory_utilization": 0.6},
            "--memory-utilization 0.5 in the plan, 0.6 here; --experts whole in the plan, columns here",
        ),
        ({}, {"swap_space": 2}, "--swap-space 0.0 in the plan, 2.0 here"),
    ],
)
def test_options_that_change_the_room_are_told_from_those_that_do_not(planned, started, text):
    own, other = (
        room_options(options := EngineOptions.from_flat(flat), options.model.max_model_len or 4096)
        for flat in (planned, started)
    )
    plan = msgspec.structs.replace(make_plan(("a", 1, 4)), options=own)
    assert set(describe_difference(plan, other).split("; ")) == set(text.split("; "))


def test_speculation_is_told_as_users_write_it():
    options = EngineOptions.from_flat({"speculative_config": {"method": "ngram"}})
    plan = msgspec.structs.replace(make_plan(("a", 1, 4)), options=room_options(EngineOptions(), 4096))
    text = describe_difference(plan, room_options(options, 4096))
    assert text.startswith('--speculative-config None in the plan, {"method":"ngram",') and text.endswith("} here")


def test_options_are_known_to_change_the_room_or_not_to():
    names = [f.name for section in SECTIONS[:4] for f in fields(section)]
    assert sorted(names) == sorted((*ROOM_OPTIONS, "max_model_len", *PLAN_OPTIONS, *OTHER_OPTIONS))


@pytest.mark.parametrize(
    "more", [{"tensor_parallel_size": 1}, {"pipeline_parallel_size": 2}, {"layers": "2,2"}, {"ranks": 0}]
)
@pytest.mark.parametrize("layout", ["auto", "plan.json"])
def test_layout_and_its_parts_contradict_each_other(layout, more):
    (name,) = more
    with pytest.raises(UserError, match=f"--layout {layout} already sets --{name.replace('_', '-')};"):
        EngineOptions.from_flat({"layout": layout} | more)


def test_dtype_goes_with_a_layout_that_is_measured_but_with_no_file():
    assert EngineOptions.from_flat({"layout": "auto", "dtype": "float32", "quantization": "int8"}).model.dtype == (
        "float32",
    )
    for more in ({"dtype": "float32"}, {"quantization": "int8"}):
        with pytest.raises(UserError, match=r"--layout plan.json already sets --(dtype|quantization)"):
            EngineOptions.from_flat({"layout": "plan.json"} | more)
