"""HeartbeatMonitor: detects peer processes whose heartbeats have stopped; Wait: report of an unfinished wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable

import msgspec

DEFAULT_TIMEOUT = 30.0
"""Default timeout: seconds without a heartbeat after which a peer counts as lost."""
BEATS = 10
"""Heartbeats that a process sends per timeout."""
START_SECONDS = 60.0
"""Seconds added to a peer's timeout until its first heartbeat arrives, as the peer may still be starting."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished wait of a process for other ranks."""

    rank: int | None
    """The waiting rank; None for the gateway."""
    peers: str
    """The ranks that are waited for: ``1``, ``1-3`` or ``0, 2``."""
    step: int
    """Id of the step in which the rank waits; -1 before the first step."""
    seconds: float


class HeartbeatMonitor:
    """Records the last heartbeat of each peer. Its owner sends a heartbeat and calls ``silent`` once every
    ``interval``.

    A process that was stopped itself (Ctrl-Z and fg) has received no heartbeats meanwhile. When it continues,
    ``silent`` notices the time since its previous call, and restarts the timeout of every peer.

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
        """Record a heartbeat of ``peer``."""
        if peer in self._heard:
            self._heard[peer] = self._clock()

    def forget(self, peer: Hashable) -> None:
        """Stop monitoring ``peer``."""
        self._heard.pop(peer, None)

    def age(self, peer: Hashable) -> float:
        """Seconds since the last heartbeat of ``peer``; negative until its first heartbeat, while it may still be
        starting."""
        return self._clock() - self._heard[peer]

    def silent(self) -> list:
        """Peers that have timed out; empty if none has. If one has, peers whose last heartbeat came up to two intervals later are
        included: they may share its fault."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > 2 * self.interval + 1.0:
            self._heard = {peer: max(heard, now) for peer, heard in self._heard.items()}
        # An interval less than the timeout, as heartbeats and checks are an interval apart: a peer is detected within the timeout.
        if all(now - heard <= self._timeout - self.interval for heard in self._heard.values()):
            return []
        return [peer for peer, heard in self._heard.items() if now - heard > self._timeout - 3 * self.interval]
