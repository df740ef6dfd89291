"""Sends on their way: their buffers are kept until they are through, and nobody waits for them on the critical path."""

from __future__ import annotations

from collections import deque

from labinfer.comm.communicator import Handle

MOST = 256
"""Sends kept where a transport cannot tell that they are through; the oldest of so many is, so waiting for it is free."""


class SendQueue:
    """The sends of one channel, oldest first."""

    def __init__(self) -> None:
        self._sends: deque[tuple[Handle, str]] = deque()

    def keep(self, handle: Handle, what: str) -> None:
        """Hold on to a send; ``what`` names it should a wait for it ever take too long."""
        while self._sends and (self._sends[0][0].done() or len(self._sends) >= MOST):
            oldest, oldest_what = self._sends.popleft()
            oldest.wait(oldest_what)
        self._sends.append((handle, what))

    def drain(self) -> None:
        """Wait until everything has arrived."""
        while self._sends:
            handle, what = self._sends.popleft()
            handle.wait(what)
