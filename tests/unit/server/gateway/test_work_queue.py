"""Costly work beside the event loop: callers take turns, queues are bounded, and what is cancelled leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from labinfer.server.gateway.work_queue import MAX_CALLERS, WorkQueue
from tests.refusals import refused


class Work:
    """Pieces of work that are held until they are let go."""

    def __init__(self):
        self.begun: list[str] = []
        self.go = threading.Event()

    def piece(self, name: str):
        def run() -> str:
            self.begun.append(name)
            assert self.go.wait(10)
            return name

        return run


async def until(condition) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 10)


def test_callers_take_turns_however_many_pieces_one_has():
    async def run() -> None:
        queue, work = WorkQueue("things", 8, "--flag"), Work()
        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        tasks = [asyncio.create_task(queue.run(name[0], work.piece(name))) for name in names]
        await until(lambda: work.begun)
        assert work.begun == ["a1"] and not queue.is_idle
        work.go.set()
        assert await asyncio.gather(*tasks) == names
        assert work.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        await until(lambda: queue.is_idle)

    asyncio.run(run())


def test_full_queue_refuses_its_caller_and_no_other():
    async def run() -> None:
        queue, work = WorkQueue("things", 2, "--flag"), Work()
        tasks = [asyncio.create_task(queue.run("a", work.piece(str(number)))) for number in range(3)]
        await until(lambda: work.begun)
        with refused(429, match=r"2 things of this caller are waiting \(limit: --flag\)"):
            await queue.run("a", work.piece("too many"))
        for caller in range(MAX_CALLERS - 1):
            tasks += [asyncio.create_task(queue.run(f"{caller}", work.piece(""))) for _ in range(2)]
        await asyncio.sleep(0)
        assert queue.is_full
        with refused(503):
            await queue.run("z", work.piece("too many"))
        work.go.set()
        await asyncio.gather(*tasks)
        assert "too many" not in work.begun and not queue.is_full

    asyncio.run(run())


def test_cancelled_work_leaves_the_queue():
    async def run() -> None:
        queue, work = WorkQueue("things", 2, "--flag"), Work()
        tasks = [asyncio.create_task(queue.run("a", work.piece(str(number)))) for number in range(3)]
        await until(lambda: work.begun)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        later = asyncio.create_task(queue.run("a", work.piece("later")))  # for which there is room again
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(tasks[0], tasks[2], later) == ["0", "2", "later"]
        assert work.begun == ["0", "2", "later"]
        await until(lambda: queue.is_idle)

    asyncio.run(run())


def test_work_that_runs_is_aborted_and_the_next_begins_when_its_thread_is_free():
    async def run() -> None:
        queue, work, aborted = WorkQueue("things", 2, "--flag"), Work(), []
        running = asyncio.create_task(queue.run("a", work.piece("first"), lambda: aborted.append(1)))
        waiting = asyncio.create_task(queue.run("a", work.piece("second")))
        await until(lambda: work.begun)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert aborted == [1] and work.begun == ["first"]
        work.go.set()
        assert await waiting == "second"

    asyncio.run(run())


def test_error_of_the_work_reaches_whoever_waits_for_it():
    async def run() -> None:
        queue = WorkQueue("things", 2, "--flag")
        with pytest.raises(ZeroDivisionError):
            await queue.run("a", lambda: 1 / 0)
        assert await queue.run("a", lambda: 1) == 1

    asyncio.run(run())
