"""HeartbeatMonitor: signs of life of other processes, and which of them have been silent for too long; Wait: what one may tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable

import msgspec

DEFAULT_TIMEOUT = 30.0
"""Seconds."""
BEATS = 10
"""Beats in the time after which a silent peer is given up."""
START_SECONDS = 60.0
"""A peer that has not been heard yet may be starting, and has so much longer."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A wait for other ranks that is not over."""

    rank: int | None
    """Rank that waits; None for the gateway."""
    peers: str
    """Ranks that it waits for: ``1``, ``1-3`` or ``0, 2``."""
    step: int
    """Id of the step that does not get on; -1 before the first."""
    seconds: float


class HeartbeatMonitor:
    """Times at which peers were heard last. Whoever has one gives a sign of life, and calls ``silent``, once every ``interval``.

    A process that was stopped itself, together with all others (Ctrl-Z and fg), has heard nobody meanwhile. It notices the gap
    between its own calls, and gives everyone their whole time again.

    Args:
        peers: whoever is to be heard.
        timeout: seconds of silence that end in ``silent``.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        peers: Iterable[Hashable],
        timeout: float = DEFAULT_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.interval = timeout / BEATS
        """Seconds between two signs of life."""
        self._timeout, self._clock = timeout, clock
        self._looked = clock()
        self._heard = dict.fromkeys(peers, self._looked + START_SECONDS)

    def hear(self, peer: Hashable) -> None:
        """Note a sign of life."""
        if peer in self._heard:
            self._heard[peer] = self._clock()

    def forget(self, peer: Hashable) -> None:
        """Expect no more of a peer."""
        self._heard.pop(peer, None)

    def age(self, peer: Hashable) -> float:
        """Seconds since the last sign of life; below 0 before the first one."""
        return self._clock() - self._heard[peer]

    def silent(self) -> list:
        """Peers to be given up: none, or one that has been silent for the whole time, with those that fell silent when it did."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > 2 * self.interval + 1.0:
            self._heard = {peer: max(heard, now) for peer, heard in self._heard.items()}
        # With the time between two beats and between two looks, a peer is given up within the timeout after it has stopped.
        if all(now - heard <= self._timeout - self.interval for heard in self._heard.values()):
            return []
        return [peer for peer, heard in self._heard.items() if now - heard > self._timeout - 3 * self.interval]
