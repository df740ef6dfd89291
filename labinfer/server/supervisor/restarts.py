"""Restarts: whether a group that died is started again, and after how long."""

from __future__ import annotations

FORGOTTEN_SECONDS = 600.0
"""A group that has run so long begins to count anew."""
LONGEST_PAUSE = 30.0
"""Seconds."""


class Restarts:
    """Counts the deaths of a group. It is started again at once, then after 1, 2, 4 … seconds.

    Args:
        limit: restarts at most.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.count = 0
        """Restarts that count."""

    def next_pause(self, lived_seconds: float) -> float | None:
        """Seconds until the next start of a group that has lived so long; None where it is given up."""
        if lived_seconds >= FORGOTTEN_SECONDS:
            self.count = 0
        if self.count >= self._limit:
            return None
        self.count += 1
        return 0.0 if self.count == 1 else min(2.0 ** (self.count - 2), LONGEST_PAUSE)
