"""The layout: layers and heads cut into shards, ranks and their neighbours, and what does not fit."""

from __future__ import annotations

import itertools

import pytest

from labinfer.base.errors import UserError
from labinfer.comm.spmd.topology import Topology, check_ranks, make_topology, per_stage, shard_range
from labinfer.models.layers.sharding import shard_heads

HEAD_SHAPES = [(kv * group, kv) for kv in range(1, 9) for group in range(1, 8)]


@pytest.mark.parametrize(("total", "parts"), list(itertools.product([1, 4, 7, 24, 160], [1, 2, 3, 5])))
def test_shard_range_is_contiguous_complete_and_even(total, parts):
    ranges = shard_range(total, parts)
    assert len(ranges) == parts
    assert [n for begin, end in ranges for n in range(begin, end)] == list(range(total))
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # earlier parts get the remainder


def test_shard_range_keeps_to_units_where_they_fit():
    assert shard_range(160, 3, 16) == [(0, 64), (64, 112), (112, 160)]


@pytest.mark.parametrize(("total", "parts", "unit"), [(170, 3, 16), (32, 3, 16)])
def test_shard_range_gives_units_up_where_they_do_not_fit(total, parts, unit):
    assert shard_range(total, parts, unit) == shard_range(total, parts)


def test_three_ranks_share_fourteen_query_heads_over_two_kv_heads():
    shards = [shard_heads(14, 2, 3, rank) for rank in range(3)]
    assert [shard.query for shard in shards] == [(0, 5), (5, 10), (10, 14)]
    assert [shard.kv for shard in shards] == [(0, 1), (0, 2), (1, 2)]
    assert [shard.kv_of_query for shard in shards] == [(0, 0, 0, 0, 0), (0, 0, 1, 1, 1), (0, 0, 0, 0)]


def test_kv_head_is_replicated_where_ranks_outnumber_kv_heads():
    shards = [shard_heads(8, 2, 4, rank) for rank in range(4)]
    assert [shard.kv for shard in shards] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_kv_heads_are_not_replicated_while_there_are_enough():
    for num_heads, num_kv in HEAD_SHAPES:
        for tp_size in range(1, num_kv + 1):
            held = [
                head for rank in range(tp_size) for head in range(*shard_heads(num_heads, num_kv, tp_size, rank).kv)
            ]
            assert held == list(range(num_kv)), (num_heads, num_kv, tp_size)


@pytest.mark.parametrize(("num_heads", "num_kv"), HEAD_SHAPES)
def test_every_query_head_is_held_once_beside_its_own_kv_head(num_heads, num_kv):
    group = num_heads // num_kv
    for tp_size in range(1, num_heads + 1):
        shards = [shard_heads(num_heads, num_kv, tp_size, rank) for rank in range(tp_size)]
        assert [head for shard in shards for head in range(*shard.query)] == list(range(num_heads))
        for shard in shards:
            assert shard.num_query == len(shard.kv_of_query) > 0
            read = [shard.kv[0] + local for local in shard.kv_of_query]
            assert read == [head // group for head in range(*shard.query)]
            assert set(read) == set(range(*shard.kv))  # none is held in vain
            assert len(set(read)) == shard.num_kv


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(UserError, match="--tensor-parallel-size 9 .* 8 attention heads"):
        shard_heads(8, 8, 9, 0)


TOPOLOGIES = {
    (2, 1): {"sources": [None, None, 0], "destinations": [[2], [], []], "sampling": 2},
    (1, 2): {"sources": [None, 0, 0], "destinations": [[1, 2], [], []], "sampling": 1},
    (3, 2): {"sources": [None, None, None, 0, 1], "destinations": [[3], [4], [], [], []], "sampling": 3},
    (2, 3): {"sources": [None, None, 0, 1, 0], "destinations": [[2, 4], [3], [], [], []], "sampling": 2},
    (1, 2, 1): {"sources": [None, 0, 0, 1], "destinations": [[1, 2], [3], [], []], "sampling": 3},
    (4,): {"sources": [None] * 4, "destinations": [[]] * 4, "sampling": 0},
}


def topology_of(tp_sizes):
    return make_topology(tp_sizes, len(tp_sizes), (), 8, sum(tp_sizes))


@pytest.mark.parametrize("tp_sizes", TOPOLOGIES)
def test_ranks_count_through_one_stage_after_another(tp_sizes):
    topology = topology_of(tp_sizes)
    assert topology.num_places == sum(tp_sizes) and topology.num_stages == len(tp_sizes)
    assert [rank for stage in range(len(tp_sizes)) for rank in topology.stage_ranks(stage)] == list(
        range(sum(tp_sizes))
    )
    for rank, place in enumerate(topology.places):
        assert place == topology.place(rank)
        assert topology.stage_ranks(place.stage)[place.tp_rank] == place.rank == rank
        assert place.tp_size == tp_sizes[place.stage]


@pytest.mark.parametrize("tp_sizes", TOPOLOGIES)
def test_who_sends_activations_to_whom(tp_sizes):
    topology, expected = topology_of(tp_sizes), TOPOLOGIES[tp_sizes]
    assert [topology.activation_source(place) for place in topology.places] == expected["sources"]
    assert [topology.activation_destinations(place) for place in topology.places] == expected["destinations"]
    assert topology.sampling_rank == expected["sampling"]


@pytest.mark.parametrize("tp_sizes", list(itertools.product([1, 2, 3, 4], repeat=3)))
def test_sources_and_destinations_are_two_views_of_the_same_links(tp_sizes):
    topology = topology_of(tp_sizes)
    received = {(topology.activation_source(place), place.rank) for place in topology.places if place.stage}
    sent = {(place.rank, dest) for place in topology.places for dest in topology.activation_destinations(place)}
    assert received == sent


def test_ranks_of_stages_may_be_any():
    topology = make_topology((2, 1), 2, (), 8, 3, ranks=(2, 1, 0))
    assert [(place.stage, place.tp_rank) for place in topology.places] == [(1, 0), (0, 0), (0, 1)]
    assert [topology.activation_source(place) for place in topology.places] == [1, None, None]
    assert [topology.activation_destinations(place) for place in topology.places] == [[], [0], []]
    assert topology.sampling_rank == 0


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((0, 3), "--ranks 0,3 names rank 3, but ranks are 0 to 2"),
        ((0, 1, 1), "--ranks 0,1,1 names rank 1 twice"),
        ((2, 1), "--ranks 2,1 leaves out rank 0, which schedules"),
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks, says):
    with pytest.raises(UserError, match=says):
        check_ranks(ranks, 3)


def test_rank_outside_the_layout_is_refused():
    with pytest.raises(ValueError, match="rank 3 is outside"):
        topology_of((2, 1)).place(3)


def test_place_reads_as_rank_stage_and_tp():
    assert str(topology_of((1, 2)).place(2)) == "rank 2 (stage 1, tp 1)"


def test_tp_group_over_two_nodes_is_refused_with_their_names():
    with pytest.raises(UserError) as caught:
        topology_of((2, 2)).check_nodes(["node-a", "node-b", "node-a", "node-b"])
    text = str(caught.value)
    assert "--tensor-parallel-size 2" in text and "stage 0" in text
    assert "rank 0 on node-a" in text and "rank 1 on node-b" in text
    assert "one after another" in text  # both nodes have room: only the order is wrong


def test_tp_group_larger_than_every_node_is_told_to_shrink():
    with pytest.raises(UserError, match=r"--tensor-parallel-size 3 .* node-b; .* use .*-tp .*\b2\b"):
        topology_of((3,)).check_nodes(["node-a", "node-a", "node-b"])


def test_tp_group_over_two_nodes_is_told_of_spare_ranks():
    topology = make_topology((2,), 0, (), 24, 3, ranks=(0, 1))
    with pytest.raises(UserError, match="choose ranks of one node .* node-a has 0, 2$"):
        topology.check_nodes(["node-a", "node-b", "node-a"])


def test_stages_may_lie_on_different_nodes():
    topology_of((2, 1)).check_nodes(["node-a", "node-a", "node-b"])


@pytest.mark.parametrize(
    ("tp", "pp", "layers", "world_size", "tp_sizes", "ranges"),
    [
        ((1,), 0, (), 1, (1,), ((0, 24),)),
        ((2,), 0, (), 4, (2, 2), ((0, 12), (12, 24))),
        ((2, 1), 0, (), 3, (2, 1), ((0, 12), (12, 24))),
        ((1,), 0, (14, 10), 2, (1, 1), ((0, 14), (14, 24))),
        ((2, 1), 2, (20, 4), 3, (2, 1), ((0, 20), (20, 24))),
        ((1,), 5, (), 5, (1,) * 5, ((0, 5), (5, 10), (10, 15), (15, 20), (20, 24))),
        ((1,), 24, (), 24, (1,) * 24, tuple((n, n + 1) for n in range(24))),
    ],
)
def test_layout_is_made_from_the_flags(tp, pp, layers, world_size, tp_sizes, ranges):
    assert make_topology(tp, pp, layers, 24, world_size) == Topology(tp_sizes, ranges)


@pytest.mark.parametrize(
    ("pp", "layers", "ranges"),
    [
        (1, (), ((0, 24),)),
        (2, (), ((0, 7), (7, 24))),
        (3, (), ((0, 4), (4, 7), (7, 24))),
        (4, (), ((0, 3), (3, 5), (5, 7), (7, 24))),
        (2, (6, 18), ((0, 6), (6, 24))),
    ],
)
def test_layers_from_the_last_cut_on_are_on_the_last_stage(pp, layers, ranges):
    assert make_topology((1,), pp, layers, 24, pp, last_cut=7).layers == ranges
    assert make_topology((1,), pp, (), 24, pp, last_cut=24) == make_topology((1,), pp, (), 24, pp)


@pytest.mark.parametrize(
    ("pp", "layers", "says"),
    [
        (2, (8, 16), "--layers 8,16 starts the last stage at layer 8, .* layer 7, .* at least 17 layers"),
        (9, (), "--pipeline-parallel-size 9 is too large .* use at most 8 stages"),
    ],
)
def test_cut_between_layers_that_share_a_cache_is_refused(pp, layers, says):
    with pytest.raises(UserError, match=says):
        make_topology((1,), pp, layers, 24, pp, last_cut=7)


@pytest.mark.parametrize(
    ("tp", "pp", "layers", "world_size", "says"),
    [
        ((2,), 2, (), 3, "-tp 2 -pp 2 needs 4 ranks, .* 3\\b"),
        ((2,), 0, (), 5, "-tp 2 -pp 2 needs 4 ranks, .* 5\\b"),
        ((2,), 0, (), 1, "-tp 2 -pp 1 needs 2 ranks, .* 1\\b"),
        ((2, 1), 0, (), 4, "-tp 2,1 needs 3 ranks, .* 4\\b"),
        ((2, 1), 3, (), 3, "names 2 stages, but --pipeline-parallel-size is 3"),
        ((1,), 25, (), 25, "--pipeline-parallel-size 25 is more than the model's 24 layers"),
        ((1,), 2, (8, 8, 8), 2, "has 3 stages, but there are 2"),
        ((1,), 2, (14, 11), 2, "--layers 14,11 adds up to 25, but the model has 24 layers"),
    ],
)
def test_flags_that_contradict_are_refused(tp, pp, layers, world_size, says):
    with pytest.raises(UserError, match=says):
        make_topology(tp, pp, layers, 24, world_size)


def test_one_value_serves_every_stage():
    assert per_stage("--dtype", ("auto",), 3) == ("auto", "auto", "auto")


def test_one_value_per_stage_is_kept():
    assert per_stage("--device", ["cuda", "cpu"], 2) == ("cuda", "cpu")


def test_another_number_of_values_is_refused():
    with pytest.raises(UserError, match="--device cuda,cpu has 2 values for 3 stages"):
        per_stage("--device", ("cuda", "cpu"), 3)
