"""VirtualClock: time that passes where somebody says that work or a wait takes it."""

from __future__ import annotations


class VirtualClock:
    """Stands in for ``labinfer.base.clock.Clock``; sleeping takes no real time. Seconds since the beginning of a simulation."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let these seconds pass."""
        self._now += seconds

    def advance_to(self, when: float) -> None:
        """Let time pass until ``when``, unless it is later already."""
        self._now = max(self._now, when)
