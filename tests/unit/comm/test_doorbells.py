"""Bells over threads: who is rung wakes up, and nobody misses a ring."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from labinfer.base.errors import WaitTimeout
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.polling import wait_until
from labinfer.comm.progress import Progress
from labinfer.comm.shared_memory import hang_doorbells
from labinfer.native import compiler

pytestmark = pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")
RANKS = (4, 7)
"""Numbers in the launch."""


def test_a_ring_ends_a_sleep_and_others_are_not_woken():
    def work(comm):
        bells = hang_doorbells(comm, RANKS, RANKS[comm.rank])
        rung = bells.rings()
        comm.barrier()
        begin = time.monotonic()
        if comm.rank == 0:
            time.sleep(0.05)
            bells.ring(RANKS[1])
            bells.ring(99)  # on another machine
            bells.sleep(rung, 0.2)
        else:
            bells.sleep(rung, 10)
        return time.monotonic() - begin, bells.rings() - rung

    (first, first_rings), (second, second_rings) = LocalCommunicator.run(2, work)
    assert (first_rings, second_rings) == (0, 1)
    assert first >= 0.2 and 0.04 < second < 5


def test_a_ring_before_the_sleep_is_not_missed():
    def work(comm):
        bells = hang_doorbells(comm, RANKS, RANKS[comm.rank])
        rung = bells.rings()
        comm.barrier()
        if comm.rank == 0:
            bells.ring(RANKS[1])
        comm.barrier()
        begin = time.monotonic()
        if comm.rank == 1:
            bells.sleep(rung, 10)
        return time.monotonic() - begin

    assert LocalCommunicator.run(2, work)[1] < 5


def test_waits_of_a_rank_whose_cores_others_use_sleep_until_the_bell():
    def work(comm):
        bells = hang_doorbells(comm, RANKS, RANKS[comm.rank])
        is_waiting, looks = [False], []
        progress = Progress(doorbells=bells, on_wait=lambda waits: is_waiting.append(waits), timeout=20)
        done = threading.Event()
        if comm.rank == 0:
            timer = threading.Timer(0.1, lambda: (done.set(), bells.ring(RANKS[0])))
            timer.start()
            wait_until(lambda: looks.append(is_waiting[-1]) or done.is_set(), "it", progress, rings=True)
            timer.join()
        comm.barrier()
        return looks, is_waiting[-1]

    (looks, after), _ = LocalCommunicator.run(2, work)
    assert set(looks) == {True} and after is False
    assert len(looks) < 200  # a rank that yields looks thousands of times


def test_a_wait_with_a_bell_has_a_limit_too():
    def work(comm):
        bells = hang_doorbells(comm, RANKS, RANKS[comm.rank])
        with pytest.raises(WaitTimeout, match=r"this rank waited 0\.05 s"):
            wait_until(lambda: False, "it", Progress(doorbells=bells, timeout=0.05), rings=True)
        comm.barrier()

    LocalCommunicator.run(2, work)


def test_without_a_compiler_there_are_none(monkeypatch):
    def fail(*arguments, **options):
        raise compiler.NoCompiler("none")

    monkeypatch.setattr("labinfer.comm.shared_memory.compiler.load", fail)
    assert LocalCommunicator.run(2, lambda comm: hang_doorbells(comm, RANKS, RANKS[comm.rank])) == [None, None]
