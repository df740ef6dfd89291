"""Layers that read the cache of an earlier one, on every kind of layout: Transformers' greedy tokens and logits."""

from __future__ import annotations

import pytest
from checkpoints import SHARED_CACHES
from golden import TOLERANCE, golden
from test_golden import run_driver

LAYOUTS = {
    "tp 2": (2, {"tensor_parallel_size": 2}, ("1f1b", 16, "hit")),
    "pp 2": (2, {"pipeline_parallel_size": 2}, ("gpipe", 1, "plain")),
    "tp 3": (3, {"tensor_parallel_size": 3}, ("lockstep", 512, "plain")),
    "tp 1,2": (3, {"tensor_parallel_size": [1, 2]}, ("1f1b", 16, "recompute")),
    "pp 3": (3, {"pipeline_parallel_size": 3}, ("1f1b", 16, "plain")),
}
"""Ranks, options, and a case of ``test_golden`` for each; where stages begin is chosen."""


@pytest.mark.parametrize(("launcher", "num_ranks"), [("torchrun", 2), ("mpirun", 3)])
def test_shared_caches_and_layer_inputs(launcher, num_ranks, tmp_path):
    layouts = {
        name: [options, [(SHARED_CACHES, *case)]]
        for name, (size, options, case) in LAYOUTS.items()
        if size == num_ranks
    }
    results = run_driver(launcher, num_ranks, layouts, tmp_path)
    for name in layouts:
        (result,) = results[name].values()
        assert all(answers == golden(SHARED_CACHES).tokens for answers in result["greedy"]), name
        assert result["logit_error"] < TOLERANCE, f"{name}: logits are off by {result['logit_error']:.2e}"
