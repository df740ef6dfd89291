"""VirtualClock: simulated time, which advances only by explicit calls."""

from __future__ import annotations


class VirtualClock:
    """Simulated ``labinfer.base.clock.Clock``: sleeping takes no real time. Counts seconds from the start of a simulation."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Seconds since the start of the simulation."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance the clock by ``seconds``."""
        self._now += seconds

    def advance_to(self, when: float) -> None:
        """Advance the clock to ``when``; does nothing if the clock is past ``when``."""
        self._now = max(self._now, when)
