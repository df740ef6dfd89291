"""SendQueue: keeps buffers of pending sends alive, so that no send blocks the critical path."""

from __future__ import annotations

from collections import deque

from labinfer.comm.communicator import Handle

MAX_SENDS = 256
"""Maximum number of pending sends, for transports that cannot report completion. Beyond this number the oldest send is surely
complete, so waiting for it takes no time."""


class SendQueue:
    """Pending sends of one channel, oldest first.

    Args:
        max_sends: maximum number of pending sends; see ``MAX_SENDS``.
    """

    def __init__(self, max_sends: int = MAX_SENDS) -> None:
        self._sends: deque[tuple[Handle, str]] = deque()
        self._max_sends = max_sends

    def keep(self, handle: Handle, what: str) -> None:
        """Keep a send until it is complete. ``what`` names it in timeout errors."""
        while self._sends and (self._sends[0][0].done() or len(self._sends) >= self._max_sends):
            oldest, oldest_what = self._sends.popleft()
            oldest.wait(oldest_what)
        self._sends.append((handle, what))

    def drain(self) -> None:
        """Wait until every send is complete."""
        while self._sends:
            handle, what = self._sends.popleft()
            handle.wait(what)
