"""Restarts: maximum number of restarts of a group of ranks, and the back-off between them."""

from __future__ import annotations

RESET_SECONDS = 600.0
"""Seconds for which a group must run so that its earlier restarts no longer count."""
MAX_BACKOFF_SECONDS = 30.0
"""Maximum back-off between two restarts, in seconds."""


class Restarts:
    """Counts the restarts of a group. The first restart is immediate; then the back-off is 1, 2, 4 … seconds.

    Args:
        limit: maximum number of restarts.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.count = 0
        """Number of restarts since the last reset."""

    def next_pause(self, lived_seconds: float) -> float | None:
        """Back-off in seconds before a group that ran for ``lived_seconds`` is restarted; None if the limit is reached."""
        if lived_seconds >= RESET_SECONDS:
            self.count = 0
        if self.count >= self._limit:
            return None
        self.count += 1
        return 0.0 if self.count == 1 else min(2.0 ** (self.count - 2), MAX_BACKOFF_SECONDS)
