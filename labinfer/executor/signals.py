"""SIGINT and SIGTERM, and the death of the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from types import FrameType

from labinfer.errors import Interrupted

GRACE_SECONDS = 5.0
"""From a signal to the end of a process whose main thread does not get around to an orderly one."""
PR_SET_PDEATHSIG = 1


class SignalGuard:
    """SIGINT and SIGTERM ask a run for an orderly end; outside of one they end the process at once.

    Handlers only take note: rank 0's main loop calls ``check`` between steps. A thread watches the clock, because the
    main thread may be inside a transport's library, where Python's handlers do not run.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.running = False
        """Whether a run is on, which rank 0 will bring to an orderly end."""
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

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    def _watch(self) -> None:
        signum = 0
        while signum not in (signal.SIGINT, signal.SIGTERM):
            signum = os.read(self._read_fd, 1)[0]
        if self.running:
            time.sleep(GRACE_SECONDS)
        os._exit(128 + signum)


def die_with_parent() -> None:
    """Get SIGTERM when the launcher's process on this node dies, however it dies (Linux, ``prctl(2)``)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
