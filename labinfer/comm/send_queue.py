"""SendQueue: keeps the buffers of sends until they are complete, so that nobody waits for a send on the critical path."""

from __future__ import annotations

from collections import deque

from labinfer.comm.communicator import Handle

MAX_SENDS = 256
"""Sends kept on a transport that cannot tell whether they are complete. The oldest of so many is, so waiting for it costs
nothing."""


class SendQueue:
    """The sends of one channel, oldest first.

    Args:
        max_sends: that are kept, on a transport as above.
    """

    def __init__(self, max_sends: int = MAX_SENDS) -> None:
        self._sends: deque[tuple[Handle, str]] = deque()
        self._max_sends = max_sends

    def keep(self, handle: Handle, what: str) -> None:
        """Keep a send until it is complete; ``what`` names it in the error of a wait that takes too long."""
        while self._sends and (self._sends[0][0].done() or len(self._sends) >= self._max_sends):
            oldest, oldest_what = self._sends.popleft()
            oldest.wait(oldest_what)
        self._sends.append((handle, what))

    def drain(self) -> None:
        """Wait until every send is complete."""
        while self._sends:
            handle, what = self._sends.popleft()
            handle.wait(what)
