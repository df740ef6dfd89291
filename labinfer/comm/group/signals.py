"""SIGINT and SIGTERM, and the death of the launcher."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from labinfer.base.errors import Interrupted
from labinfer.comm.spmd.environment import LaunchEnvironment

GRACE_SECONDS = 5.0
"""From a signal to the end of a process whose main thread does not get around to an orderly one."""
ONE_WISH_SECONDS = 1.0
"""Signals so close together are one."""
NUDGE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.3)
"""After each of the nudges that follow a signal."""
NUDGE = signal.SIGURG
"""Means nothing to launchers, schedulers and programs, and ends none that doesn't know it."""
PR_SET_PDEATHSIG = 1


class SignalGuard:
    """SIGINT and SIGTERM ask a run for an orderly end; outside of one they end the process at once.

    Handlers only take note: rank 0's main loop calls ``check`` between steps. A thread watches the clock, because the
    main thread may be inside a transport's library, where Python's handlers do not run. A second signal ends the process
    at once.

    A signal in the instant before the main thread begins to wait for a key would be noticed with the next line only, so
    the watching thread nudges it, some times: the nudge interrupts the wait, and what has been noted is raised.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.running = False
        """Whether a run is on, which rank 0 will bring to an orderly end."""
        self.interrupt_ends = True
        """Whether SIGINT is a wish for the end. In a chat it is not: it is only taken note of."""
        self.grace_seconds = GRACE_SECONDS
        self.tell: Callable[[int], None] = lambda signum: None
        """Called from the watching thread with the first signal that asks for the end, before anything comes of it."""
        self._raises = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._take_note)
        signal.signal(NUDGE, self._interrupt)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def take(self, signum: int) -> None:
        """Take a signal that has come to another rank as one to this process; from any thread."""
        self._take_note(signum, None)
        os.write(self._write_fd, bytes([signum]))

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

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        # Not in _take_note: of two handlers that are due at once, the one with the higher number is to be the one that
        # raises, or Python may run the other while the exception is on its way, and fails (seen with 3.10).
        if self._raises and self.signum:
            self._raises = False  # one exception is enough: the next would meet it on its way
            self.check()

    def _watch(self) -> None:
        signum = self._next_wish(None)
        self.tell(signum)
        if self.running:
            # Launchers and terminals may send the same signal twice at once; only a later one is a second wish.
            time.sleep(min(ONE_WISH_SECONDS, self.grace_seconds))
            while self._next_wish(0):
                pass
            self._next_wish(self.grace_seconds - ONE_WISH_SECONDS)
        os._exit(128 + signum)

    def _next_wish(self, seconds: float | None) -> int:
        """The next signal that asks for the end; 0 where none comes within these seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not select.select([self._read_fd], [], [], left)[0]:
                return 0
            signum = os.read(self._read_fd, 1)[0]
            if signum != NUDGE:
                self._nudge()
            if signum == signal.SIGTERM or (signum == signal.SIGINT and self.interrupt_ends):
                return signum

    def _nudge(self) -> None:
        for seconds in NUDGE_SECONDS:
            if not self._raises:
                return
            signal.pthread_kill(threading.main_thread().ident, NUDGE)
            time.sleep(seconds)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Python's own Ctrl-C back to the end of a block that must not be broken off in its middle.

    ``KeyboardInterrupt`` is raised behind the block; a second Ctrl-C raises it at once, for a block that does not end. Nothing
    changes in threads other than the main one, and where somebody handles SIGINT otherwise.
    """
    usual, is_main = signal.default_int_handler, threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signals: list[int] = []

    def take_note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        if len(signals) > 1:
            usual(signum, frame)

    signal.signal(signal.SIGINT, take_note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if signals:
        raise KeyboardInterrupt


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Get a signal when the process that started this one dies, however it dies (Linux, ``prctl(2)``)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)


def die_with_launcher(environment: LaunchEnvironment) -> None:
    """Have a rank end when its launcher dies. To be called as early as can be: a death before it is not noticed."""
    if environment.launcher != "single":
        die_with_parent(signal.SIGKILL if environment.supervisor else signal.SIGTERM)
