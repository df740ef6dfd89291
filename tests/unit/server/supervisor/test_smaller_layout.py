"""Flags for the ranks that are left."""

from __future__ import annotations

import pytest

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.server.supervisor.smaller_layout import smaller_layout

NODES = ["a", "a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("options", "left", "flags"),
    [
        ({}, [0, 1, 4], "-tp 1,1,1 -pp 3"),
        ({"tensor_parallel_size": (2, 2, 1)}, [0, 1, 4], "-tp 2,1 -pp 2"),
        ({"tensor_parallel_size": (2, 2, 1)}, [0, 1, 2, 3], "-tp 2,2 -pp 2"),
        ({"layers": (5, 5, 5, 5, 4)}, [0, 1, 4], "-tp 1,1,1 -pp 3 --layers 9,8,7"),
        ({"tensor_parallel_size": (2, 2, 1), "layers": (14, 7, 3)}, [0, 1, 4], "-tp 2,1 -pp 2 --layers 20,4"),
        (
            {"tensor_parallel_size": (2, 2, 1), "dtype": ("float32", "float16", "bfloat16"), "device": ("cpu",)},
            [0, 1, 4],
            "-tp 2,1 -pp 2 --dtype float32,bfloat16",
        ),
        (
            {"tensor_parallel_size": (2, 2, 1), "quantization": "none,int4,int8", "quantization_group_size": 32},
            [0, 1, 4],
            "-tp 2,1 -pp 2 --quantization none,int8 --quantization-group-size 64",
        ),
        ({"ranks": (4, 0, 1, 2)}, [0, 1, 4], "-tp 1,1,1 -pp 3 --ranks 2,0,1"),
        ({"ranks": (0, 2), "layers": (3, 1)}, [0, 1, 4], "-tp 1,1 -pp 2 --ranks 0,1 --layers 3,1"),
        ({"ranks": (0, 1, 4), "tensor_parallel_size": (2, 1)}, [0, 1, 2, 3], "-tp 2,1 -pp 2 --ranks 0,1,2"),
        (
            {"ranks": (0, 1), "speculative_config": {"model": "x", "draft_rank": 4, "num_speculative_tokens": 3}},
            [0, 1, 4],
            '-tp 1,1 -pp 2 --ranks 0,1 --speculative-config {"method": "draft_model", "model": "x", "draft_rank": 2, '
            '"num_speculative_tokens": 3}',
        ),
        (
            {"ranks": (0, 2), "speculative_config": {"model": "x", "draft_rank": 1}},
            [0, 1],
            '-tp 1,1 -pp 2 --ranks 0,1 --speculative-config {"method": "ngram"}',
        ),
    ],
    ids=[
        "even",
        "tp",
        "last",
        "layers",
        "grown",
        "dtypes",
        "quantizations",
        "order",
        "spare",
        "spare of another machine",
        "draft rank",
        "draft rank that stands in",
    ],
)
def test_stages_that_lost_no_rank_stay_and_spare_ranks_stand_in(options, left, flags):
    assert " ".join(smaller_layout(EngineOptions.from_flat(options), NODES, left)) == flags


def test_rank_0_cannot_be_gone_on_without():
    with pytest.raises(UserError, match="rank 0, which schedules, was on a"):
        smaller_layout(EngineOptions(), NODES, [2, 3, 4])


@pytest.mark.parametrize("layout", ["auto", "plan.json"])
def test_ranks_that_follow_a_plan_read_or_make_it_again(layout):
    assert smaller_layout(EngineOptions.from_flat({"layout": layout}), NODES, [0, 1, 4]) == []
