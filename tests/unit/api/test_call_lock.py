"""Threads that take turns, also where one ended in the middle of its own."""

from __future__ import annotations

import threading
import time

from labinfer.api.call_lock import CallLock


def test_one_thread_alone_takes_over_from_one_that_has_ended():
    turns, running, most = CallLock("thing"), [], []

    def left_unfinished():
        try:
            yield 1
            yield 2
        finally:
            time.sleep(0.2)  # the end takes a while

    def work(number: int):
        with turns.turn():
            running.append(number)
            most.append(len(running))
            time.sleep(0.05)
            running.remove(number)

    iterators = []
    first = threading.Thread(target=lambda: iterators.append(turns.run(left_unfinished())) or next(iterators[0]))
    first.start()
    first.join()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [1] * 4


def test_later_call_of_the_same_thread_ends_an_iterator():
    turns, ended = CallLock("thing"), []

    def steps():
        try:
            yield from range(3)
        finally:
            ended.append(True)

    iterator = turns.run(steps())
    assert next(iterator) == 0
    assert list(turns.run(iter_of_two())) == [1, 2] and ended


def iter_of_two():
    yield 1
    yield 2
