"""Links between all pairs of hosts are measured, each once, and in rounds in which no host is in two pairs."""

from __future__ import annotations

import itertools
import time

import pytest

from labinfer.comm.links import measure_links, measure_neighbours, pair_rounds
from labinfer.comm.local import LocalCommunicator


@pytest.mark.parametrize("count", range(1, 10))
def test_rounds_have_every_pair_once_and_no_host_twice_in_a_round(count):
    rounds = pair_rounds(count)
    assert sorted(itertools.chain.from_iterable(rounds)) == list(itertools.combinations(range(count), 2))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == max(0, count - 1 + count % 2)


class SlowCable:
    """A communicator whose messages take a time and a rate, on one pair another one."""

    def __init__(self, comm, slow_pair=(), latency=0.0, bytes_per_second=1e12):
        self._comm, self._slow, self._latency, self._rate = comm, set(slow_pair), latency, bytes_per_second

    def isend(self, tensor, dest):
        if {self._comm.rank, dest} == self._slow:
            time.sleep(self._latency + tensor.nbytes / self._rate)
        return self._comm.isend(tensor, dest)

    def __getattr__(self, name):
        return getattr(self._comm, name)


@pytest.mark.timing
def test_slow_pair_is_told_from_the_others_on_every_rank():
    """Five ranks on three hosts, of which the first ranks measure."""

    def work(comm):
        return measure_links(SlowCable(comm, (0, 4), latency=0.01, bytes_per_second=1e8), [0, 2, 4])

    results = LocalCommunicator.run(5, work)
    assert all(result == results[0] for result in results)
    assert list(results[0]) == [(0, 1), (0, 2), (1, 2)]
    slow = results[0].pop((0, 2))
    assert 0.01 <= slow.latency < 0.02 and 0.3e8 < slow.bytes_per_second < 1.5e8
    assert all(link.latency < 0.005 for link in results[0].values())


@pytest.mark.timing
def test_neighbours_send_at_once_in_the_order_of_the_stages():
    def work(comm):
        return measure_neighbours(SlowCable(comm, (1, 2), bytes_per_second=1e8), [1, 2, 0])

    results = LocalCommunicator.run(4, work)
    assert all(result == results[0] for result in results) and set(results[0]) == {(0, 1), (1, 2)}
    assert results[0][0, 1] <= 1e8 * 1.2 < results[0][1, 2]


def test_single_host_has_no_links():
    assert LocalCommunicator.run(2, lambda comm: measure_links(comm, [0])) == [{}, {}]
    assert LocalCommunicator.run(1, lambda comm: measure_neighbours(comm, [0])) == [{}]
