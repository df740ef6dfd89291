"""HeartbeatMonitor: detects peer processes whose heartbeats have stopped; Wait: report of an unfinished wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable

import msgspec

DEFAULT_TIMEOUT = 30.0
"""Timeout in seconds."""
BEATS = 10
"""Heartbeats per timeout."""
START_SECONDS = 60.0
"""Additional seconds before the first heartbeat of a peer, which may still be starting."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished wait for other ranks."""

    rank: int | None
    """Rank that waits; None for the gateway."""
    peers: str
    """Ranks that it waits for: ``1``, ``1-3`` or ``0, 2``."""
    step: int
    """Id of the step that is stuck; -1 before the first."""
    seconds: float


class HeartbeatMonitor:
    """Records the last heartbeat of each peer. Its owner sends a heartbeat and calls ``silent`` once every
    ``interval``.

    A process that was stopped itself (Ctrl-Z and fg) has received no heartbeats meanwhile. It detects the gap between
    its own calls of ``silent``, and restarts the timeout of every peer.

    Args:
        peers: peers to monitor.
        timeout: seconds without a heartbeat after which ``silent`` returns a peer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        peers: Iterable[Hashable],
        timeout: float = DEFAULT_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.interval = timeout / BEATS
        """Seconds between two heartbeats."""
        self._timeout, self._clock = timeout, clock
        self._looked = clock()
        self._heard = dict.fromkeys(peers, self._looked + START_SECONDS)

    def hear(self, peer: Hashable) -> None:
        """Record a heartbeat."""
        if peer in self._heard:
            self._heard[peer] = self._clock()

    def forget(self, peer: Hashable) -> None:
        """Stop monitoring a peer."""
        self._heard.pop(peer, None)

    def age(self, peer: Hashable) -> float:
        """Seconds since the last heartbeat; may be below 0 before the first one."""
        return self._clock() - self._heard[peer]

    def silent(self) -> list:
        """Peers that have timed out, with those that fell silent at about that time; empty if none has timed out."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > 2 * self.interval + 1.0:
            self._heard = {peer: max(heard, now) for peer, heard in self._heard.items()}
        # An interval less than the timeout, as heartbeats and checks are an interval apart: a peer is detected within the timeout.
        if all(now - heard <= self._timeout - self.interval for heard in self._heard.values()):
            return []
        return [peer for peer, heard in self._heard.items() if now - heard > self._timeout - 3 * self.interval]
