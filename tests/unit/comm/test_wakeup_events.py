"""Wake-up events over threads: a notified rank wakes up, and no notification is missed."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from labinfer.base.errors import WaitTimeout
from labinfer.comm.local import LocalCommunicator
from labinfer.comm.progress import Progress
from labinfer.comm.shared_memory_ring import WakeupEvents, share_rings
from labinfer.native import compiler

pytestmark = pytest.mark.skipif(not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler")


def events_of(comm: LocalCommunicator) -> WakeupEvents:
    return share_rings(comm, [comm], range(2))[0].events


def test_a_notification_ends_a_sleep_and_others_are_not_woken():
    def work(comm):
        events = events_of(comm)
        count = events.count()
        comm.barrier()
        begin = time.monotonic()
        if comm.rank == 0:
            time.sleep(0.05)
            events.notify(1)
            events.notify(99)  # on another machine
            events.sleep(count, 0.2)
        else:
            events.sleep(count, 10)
        return time.monotonic() - begin, events.count() - count

    (first, first_count), (second, second_count) = LocalCommunicator.run(2, work)
    assert (first_count, second_count) == (0, 1)
    assert first >= 0.2 and 0.04 < second < 5


def test_a_notification_before_the_sleep_is_not_missed():
    def work(comm):
        events = events_of(comm)
        count = events.count()
        comm.barrier()
        if comm.rank == 0:
            events.notify(1)
        comm.barrier()
        begin = time.monotonic()
        if comm.rank == 1:
            events.sleep(count, 10)
        return time.monotonic() - begin

    assert LocalCommunicator.run(2, work)[1] < 5


def test_waits_of_a_rank_whose_core_others_use_sleep_until_the_event():
    def work(comm):
        events = events_of(comm)
        is_waiting, looks = [False], []
        progress = Progress(on_wait=is_waiting.append, timeout=20)
        done = threading.Event()
        if comm.rank == 0:
            timer = threading.Timer(0.1, lambda: (done.set(), events.notify(0)))
            timer.start()
            events.wait_until(lambda: looks.append(is_waiting[-1]) or done.is_set(), "it", progress, None, 0.1)
            timer.join()
        comm.barrier()
        return looks, is_waiting[-1]

    (looks, after), _ = LocalCommunicator.run(2, work)
    assert set(looks) == {True} and after is False
    assert len(looks) < 200  # a rank that yields looks thousands of times


def test_a_wait_with_an_event_has_a_limit_too():
    def work(comm):
        events = events_of(comm)
        with pytest.raises(WaitTimeout, match=r"this rank waited 0\.05 s"):
            events.wait_until(lambda: False, "it", Progress(timeout=0.05), None, 0.1)
        comm.barrier()

    LocalCommunicator.run(2, work)
