"""SIGINT and SIGTERM, and the death of the launcher."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from labinfer.errors import Interrupted

GRACE_SECONDS = 5.0
"""From a signal to the end of a process whose main thread does not get around to an orderly one."""
ONE_WISH_SECONDS = 1.0
"""Signals so close together are one."""
PR_SET_PDEATHSIG = 1


class SignalGuard:
    """SIGINT and SIGTERM ask a run for an orderly end; outside of one they end the process at once.

    Handlers only take note: rank 0's main loop calls ``check`` between steps. A thread watches the clock, because the
    main thread may be inside a transport's library, where Python's handlers do not run. A second signal ends the process
    at once.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.running = False
        """Whether a run is on, which rank 0 will bring to an orderly end."""
        self.interrupt_ends = True
        """Whether SIGINT is a wish for the end. In a chat it is not: it is only taken note of."""
        self.grace_seconds = GRACE_SECONDS
        self._raises = False
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._take_note)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def check(self) -> None:
        """Raises:
        Interrupted: a signal came.
        """
        if self.signum:
            raise Interrupted(self.signum)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """While the main thread waits for a user or a server: a signal raises ``Interrupted`` there at once."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        if self._raises:
            self.check()

    def _watch(self) -> None:
        signum = self._next_signal()
        if self.running:
            # Launchers and terminals may send the same signal twice at once; only a later one is a second wish.
            time.sleep(min(ONE_WISH_SECONDS, self.grace_seconds))
            while select.select([self._read_fd], [], [], 0)[0]:
                self._next_signal()
            select.select([self._read_fd], [], [], self.grace_seconds - ONE_WISH_SECONDS)
        os._exit(128 + signum)

    def _next_signal(self) -> int:
        while True:
            signum = os.read(self._read_fd, 1)[0]
            if signum == signal.SIGTERM or (signum == signal.SIGINT and self.interrupt_ends):
                return signum


def die_with_parent() -> None:
    """Get SIGTERM when the launcher's process on this node dies, however it dies (Linux, ``prctl(2)``)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
