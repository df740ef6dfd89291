"""What the start of a run says of the stage with the least room for KV blocks, and of a plan's blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labinfer.base.cache_sizes import CacheSizes
from labinfer.comm.spmd.topology import Topology
from labinfer.launch.layout.kv_capacity import KVCapacity

TOPOLOGY = Topology((2, 1, 1), ((0, 1), (1, 2), (2, 3)))
PLACES = TOPOLOGY.places


@pytest.mark.parametrize(
    ("of_rank", "said"),
    [
        ((80, 80, 80, 80), ""),
        (
            (80, 80, 100, 200),
            "limited by stage 0; stage 2 could hold 200 (150 % more); move layers there with --layers",
        ),
        (
            (80, 90, 80, 84),
            "limited by stage 0, 1; stage 0 could hold 90 (12 % more); move layers there with --layers",
        ),
    ],
)
def test_stage_that_limits_is_named(of_rank, said):
    capacity = KVCapacity(sizes=CacheSizes(num_blocks=min(of_rank), max_model_len=100), blocks_of_rank=of_rank)
    assert capacity.describe_limit(PLACES) == said


@pytest.mark.parametrize(
    ("planned", "limit", "shortfall"),
    [
        (70, "number of blocks from the plan; 80 would fit", ""),
        (80, "", ""),
        (85, "limited by stage 0", "1280 tokens fit, fewer than the 1360 of the plan: stage 0 has less free memory"),
        (95, "limited by stage 0", "1280 tokens fit, fewer than the 1520 of the plan: stage 0, 1 has less free memory"),
    ],
)
def test_blocks_of_a_plan_are_had_or_their_lack_is_told(planned, limit, shortfall):
    of_rank = (80, 80, 90, 200)
    capacity = KVCapacity(
        sizes=CacheSizes(num_blocks=min(*of_rank, planned), max_model_len=100),
        blocks_of_rank=of_rank,
        planned_blocks=planned,
    )
    layout = SimpleNamespace(topology=TOPOLOGY, tokens_in=lambda num_blocks: 16 * num_blocks)
    said = (capacity.describe_limit(PLACES), capacity.describe_shortfall(layout))
    assert said[0].startswith(limit) and bool(said[0]) == bool(limit)
    assert said[1].startswith(shortfall) and bool(said[1]) == bool(shortfall)
