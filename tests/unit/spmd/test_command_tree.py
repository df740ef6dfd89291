"""CommandTree: every rank gets each command once, and from a rank that needs it no later."""

from __future__ import annotations

import pytest

from labinfer.spmd.command_tree import FAN_OUT, MAX_DIRECT, CommandTree
from labinfer.spmd.topology import Topology


def topology(tp_sizes: tuple[int, ...], ranks: tuple[int, ...] = ()) -> Topology:
    return Topology(tp_sizes, tuple((stage, stage + 1) for stage in range(len(tp_sizes))), ranks)


@pytest.mark.parametrize("size", [1, 2, MAX_DIRECT + 1])
def test_few_ranks_hear_rank_0_itself(size):
    tree = CommandTree(range(size))
    assert list(tree.receivers(0)) == list(range(1, size))
    assert all(tree.sender(rank) == 0 and not tree.receivers(rank) for rank in range(1, size))


@pytest.mark.parametrize("size", [MAX_DIRECT + 2, 72, 512, 513, 1000])
def test_each_of_many_ranks_hears_one_other(size):
    tree = CommandTree(range(size))
    sent = [(sender, rank) for sender in range(size) for rank in tree.receivers(sender)]
    assert sorted(rank for _, rank in sent) == list(range(1, size))
    assert all(tree.sender(rank) == sender for sender, rank in sent)
    assert max(len(tree.receivers(rank)) for rank in range(size)) == FAN_OUT


def test_512_ranks_are_three_sends_away():
    tree = CommandTree(range(512))

    def depth(rank: int) -> int:
        return 1 + depth(tree.sender(rank)) if rank else 0

    assert max(map(depth, range(512))) == 3


@pytest.mark.parametrize(
    ("tp_sizes", "ranks"),
    [
        ((8,) * 64, ()),
        ((1,) * 40, tuple(range(39, -1, -1))),
        ((16, 3, 1, 16), (*range(20, 36), *range(1, 5), *range(5, 20), 0)),
    ],
)
def test_nobody_hears_a_rank_of_a_later_stage(tp_sizes, ranks):
    layout = topology(tp_sizes, ranks)
    tree = CommandTree(layout.command_order)
    assert sorted(tree.ranks) == list(layout.placed_ranks) and tree.ranks[0] == 0
    for rank in tree.ranks[1:]:
        sender = tree.sender(rank)
        assert sender == 0 or layout.place(sender).stage <= layout.place(rank).stage


def test_spare_ranks_have_no_part():
    assert topology((1, 2), ranks=(4, 0, 2)).command_order == (0, 4, 2)
