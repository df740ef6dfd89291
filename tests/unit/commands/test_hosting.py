"""Options of a layout that is asked for while another is served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from labinfer.commands.hosting import changed_options
from labinfer.config import EngineOptions, ParallelOptions
from labinfer.errors import UserError
from labinfer.link.layout_change import LayoutChange
from labinfer.planner.saved_plan import SavedPlan, SavedStage


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
    options = changed(before, {"dtype": ["float16"]}, 2)
    assert options == EngineOptions.from_flat(before | {"dtype": "float16"})


def test_plan_says_all():
    stages = [
        SavedStage(machine="node", layers=layers, tp_size=1, dtype=dtype, quantization="none")
        for layers, dtype in ((4, "bfloat16"), (2, "float32"))
    ]
    plan = SavedPlan(model="digest", stages=stages)
    options = changed({}, {"plan": plan}, 3)
    assert (options.parallel.layers, options.parallel.ranks) == ((4, 2), (0, 1))
    assert options.model.dtype == ("bfloat16", "float32")
    with pytest.raises(UserError, match="plan says what all other fields say"):
        changed({}, {"plan": plan, "layers": [4, 2]}, 3)


def test_values_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="packed12"):
        changed({"weights": "packed12"}, {"quantization": "int8"}, 1)
