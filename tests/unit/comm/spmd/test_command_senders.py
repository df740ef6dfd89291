"""command_senders: every rank gets each command once, and from a rank that needs it no later."""

from __future__ import annotations

from collections import Counter

import pytest

from labinfer.comm.spmd.command_senders import FAN_OUT, MAX_DIRECT, command_senders
from labinfer.comm.spmd.topology import Topology


def topology(tp_sizes: tuple[int, ...], ranks: tuple[int, ...] = ()) -> Topology:
    return Topology(tp_sizes, tuple((stage, stage + 1) for stage in range(len(tp_sizes))), ranks)


@pytest.mark.parametrize("size", [1, 2, MAX_DIRECT + 1])
def test_few_ranks_hear_rank_0_itself(size):
    assert command_senders(range(size)) == dict.fromkeys(range(1, size), 0)


@pytest.mark.parametrize("size", [MAX_DIRECT + 2, 72, 512, 513, 1000])
def test_each_of_many_ranks_hears_one_other(size):
    senders = command_senders(range(size))
    assert sorted(senders) == list(range(1, size))
    assert max(Counter(senders.values()).values()) == FAN_OUT


def test_512_ranks_are_three_sends_away():
    senders = command_senders(range(512))

    def depth(rank: int) -> int:
        return 1 + depth(senders[rank]) if rank else 0

    assert max(map(depth, range(512))) == 3


@pytest.mark.parametrize(
    ("tp_sizes", "ranks"),
    [
        ((8,) * 64, ()),
        ((1,) * 40, tuple(range(39, -1, -1))),
        ((16, 3, 1, 16), (*range(20, 36), *range(1, 4), 4, *range(5, 20), 0)),
    ],
)
def test_nobody_hears_a_rank_of_a_later_stage(tp_sizes, ranks):
    layout = topology(tp_sizes, ranks)
    senders = command_senders(layout.command_order)
    assert [0, *sorted(senders)] == list(layout.placed_ranks)
    for rank, sender in senders.items():
        assert sender == 0 or layout.place(sender).stage <= layout.place(rank).stage


def test_spare_ranks_have_no_part():
    assert topology((1, 2), ranks=(4, 0, 2)).command_order == (0, 4, 2)
