"""FakeClock: time that passes only when a test says so; ``settle``: tasks that go as far as they can without it."""

from __future__ import annotations

import asyncio


class FakeClock:
    """Stands in for ``labinfer.base.clock.Clock``; sleeping takes no time."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(4):
        await asyncio.sleep(0)
