"""Rings over threads. What needs processes is in tests/dist, and the order of memory accesses in ring_threads.cpp."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch

from labinfer.base.errors import WaitTimeout
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.shared_memory_ring import LARGEST_BYTES, ROOM_BYTES, RingCommunicator, share_rings
from labinfer.comm.wire import WireError
from labinfer.native import compiler

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")


def with_rings(comm: LocalCommunicator) -> RingCommunicator:
    (rings,) = share_rings(comm, [comm], range(comm.size))
    assert isinstance(rings, RingCommunicator)
    return rings


@needs_compiler
def test_messages_of_all_pairs_come_in_order_and_far_more_than_a_ring_holds():
    sizes = [(number * 7919) % LARGEST_BYTES for number in range(100)]
    assert sum(sizes) > 5 * ROOM_BYTES

    def work(comm):
        rings = with_rings(comm)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        for number, size in enumerate(sizes):
            arrivals = {rank: torch.empty(size, dtype=torch.uint8) for rank in others}
            receives = [rings.irecv(arrivals[rank], rank) for rank in others]
            for rank in others:
                rings.isend(torch.full((size,), (number + 10 * comm.rank) % 256, dtype=torch.uint8), rank)
            for receive in receives:
                receive.wait("a message")
            for rank, arrival in arrivals.items():
                assert bool((arrival == (number + 10 * rank) % 256).all())

    LocalCommunicator.run(3, work)


@needs_compiler
def test_groups_on_the_same_memory_do_not_mix():
    def work(comm):
        first, second = share_rings(comm, [comm, comm], range(2))
        if comm.rank == 0:
            second.isend(torch.tensor([2]), 1)
            first.isend(torch.tensor([1]), 1)
            return None
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        for rings, tensor in zip((first, second), found, strict=True):
            rings.irecv(tensor, 0).wait("a number")
        return [int(tensor) for tensor in found]

    assert LocalCommunicator.run(2, work)[1] == [1, 2]


@needs_compiler
def test_who_finds_no_room_waits_until_there_is():
    taken = threading.Event()
    count = 2 * ROOM_BYTES // LARGEST_BYTES

    def work(comm):
        rings = with_rings(comm)
        if comm.rank == 0:
            for number in range(count):
                rings.isend(torch.full((LARGEST_BYTES // 4,), number, dtype=torch.int32), 1)
            assert taken.is_set()
            return
        taken.wait(0.2)  # the other one cannot have sent all
        taken.set()
        for number in range(count):
            arrival = torch.empty(LARGEST_BYTES // 4, dtype=torch.int32)
            rings.irecv(arrival, 0).wait("a message")
            assert bool((arrival == number).all())

    LocalCommunicator.run(2, work)


@needs_compiler
def test_who_never_finds_room_says_whom_it_waited_for():
    def work(comm):
        rings = with_rings(comm)
        if comm.rank == 0:
            comm.progress.timeout = 0.1
            with pytest.raises(WaitTimeout, match=r"rank 0 waited 0\.1 s .* for room for messages at rank 1"):
                for _ in range(1 + ROOM_BYTES // LARGEST_BYTES):
                    rings.isend(torch.zeros(LARGEST_BYTES // 4), 1)

    LocalCommunicator.run(2, work)


@needs_compiler
def test_a_message_of_another_size_than_its_receive_is_refused():
    def work(comm):
        rings = with_rings(comm)
        if comm.rank == 0:
            rings.isend(torch.zeros(3), 1)
        else:
            with pytest.raises(WireError, match="rank 0 sent 12 bytes where 16 were expected"):
                rings.irecv(torch.zeros(4), 0).wait("four numbers")

    LocalCommunicator.run(2, work)


@needs_compiler
def test_a_later_receive_that_is_looked_at_first_does_not_take_the_earlier_message():
    def work(comm):
        rings = with_rings(comm)
        if comm.rank == 0:
            rings.isend(torch.tensor([1]), 1)
            rings.isend(torch.tensor([2]), 1)
            return None
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        receives = [rings.irecv(tensor, 0) for tensor in found]
        receives[1].wait("the second one")
        assert receives[0].done()
        return [int(tensor) for tensor in found]

    assert LocalCommunicator.run(2, work)[1] == [1, 2]


@needs_compiler
def test_a_transport_that_moves_only_in_calls_is_called_while_a_rank_waits():
    """tests/dist has a message that depends on it, unless this machine's MPI reads other processes' memory."""

    class Polled(LocalCommunicator):
        polls, calls = True, 0

        def advance(self) -> None:
            self.calls += 1

    def work(comm):
        comm.__class__, comm.progress.oversubscribed, comm.progress.timeout = Polled, True, 0.1
        rings, others = share_rings(comm, [comm, comm], range(2))
        with pytest.raises(WaitTimeout):
            others.irecv(torch.zeros(1), 1 - comm.rank).wait("what nobody sends")
        assert comm.calls > 20
        comm.calls = 0
        with pytest.raises(WaitTimeout):
            for _ in range(1 + ROOM_BYTES // LARGEST_BYTES):
                rings.isend(torch.zeros(LARGEST_BYTES // 4), 1 - comm.rank)
        assert comm.calls > 20

    LocalCommunicator.run(2, work)


@needs_compiler
def test_two_ranks_that_find_no_room_at_each_other_both_go_on():
    """Neither takes a message before it has sent all of its own; the receives are posted."""
    count = 2 * ROOM_BYTES // LARGEST_BYTES

    def work(comm):
        rings, others = share_rings(comm, [comm, comm], range(2))
        sends, receives = (rings, others) if comm.rank == 0 else (others, rings)
        arrivals = [torch.empty(LARGEST_BYTES // 4, dtype=torch.int32) for _ in range(count)]
        handles = [receives.irecv(arrival, 1 - comm.rank) for arrival in arrivals]
        for number in range(count):
            sends.isend(torch.full((LARGEST_BYTES // 4,), number, dtype=torch.int32), 1 - comm.rank)
        for number, (handle, arrival) in enumerate(zip(handles, arrivals, strict=True)):
            handle.wait("a message")
            assert bool((arrival == number).all())

    LocalCommunicator.run(2, work, timeout=20)


def test_without_a_compiler_the_transport_remains(monkeypatch):
    def fail(*arguments, **options):
        raise compiler.NoCompiler("none")

    monkeypatch.setattr("labinfer.comm.shared_memory_ring.compiler.load", fail)
    assert LocalCommunicator.run(2, lambda comm: share_rings(comm, [comm], range(2)) == [comm]) == [True] * 2


def test_a_rank_alone_on_its_machine_has_none_and_no_group_needs_none():
    comm = LocalCommunicator()
    assert share_rings(comm, [comm], [0]) == [comm]
    assert LocalCommunicator.run(2, lambda comm: share_rings(comm, [], range(2))) == [[], []]
