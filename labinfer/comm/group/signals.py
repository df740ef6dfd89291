"""SignalGuard: handling of SIGINT and SIGTERM during a run; and the end of a process whose parent dies."""

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
"""Time between a signal and the forced exit of a process whose main thread does not shut down."""
DEBOUNCE_SECONDS = 1.0
"""Signals closer together than this count as one."""
NUDGE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.3)
"""Seconds to wait after each nudge (``SignalGuard`` nudges the main thread after a signal)."""
NUDGE = signal.SIGURG
"""Signal that a nudge sends to the main thread. Launchers and schedulers ignore SIGURG, and its default action is to do nothing."""
PR_SET_PDEATHSIG = 1


class SignalGuard:
    """SIGINT and SIGTERM request an orderly shutdown during a run; outside of a run they end the process at once.

    Handlers only record the signal; rank 0's main loop calls ``check`` between steps. A watcher thread enforces the deadline, because
    the main thread may be inside a transport's library, where Python's handlers do not run. A second signal ends the process at
    once.

    A signal just before the main thread starts to wait for a key would only be noticed with the next line. The watcher thread
    therefore nudges the main thread a few times: each nudge interrupts the wait, and the recorded signal is raised.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.running = False
        """Whether a run is active, so that rank 0 ends it after a signal before the process exits."""
        self.interrupt_ends = True
        """Whether SIGINT requests a shutdown. In a chat it is only recorded."""
        self.grace_seconds = GRACE_SECONDS
        self.tell: Callable[[int], None] = lambda signum: None
        """Called from the watcher thread with the first signal that requests a shutdown, before the shutdown begins."""
        self._raises = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._take_note)
        signal.signal(NUDGE, self._interrupt)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def take(self, signum: int) -> None:
        """Handle a signal that another rank got as if this process had got it; may be called from any thread."""
        self._take_note(signum, None)
        os.write(self._write_fd, bytes([signum]))

    def check(self) -> None:
        """Raise if a signal was received.

        Raises:
            Interrupted: a signal was received.
        """
        if self.signum:
            raise Interrupted(self.signum)

    def dismiss_interrupt(self) -> None:
        """Forget a recorded interrupt (SIGINT) after the program has handled this signal. A recorded SIGTERM stays."""
        if self.signum == signal.SIGINT:
            self.signum = 0

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise ``Interrupted`` from signals at once, while the main thread waits for a user or a server."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def _take_note(self, signum: int, frame: FrameType | None) -> None:
        if not self.signum or signum == signal.SIGTERM:  # a SIGTERM counts while a SIGINT is handled, too
            self.signum = signum

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        # Not in _take_note: when two handlers are due at once, the one with the higher signal number must raise. Otherwise Python may
        # run the other one while the exception propagates, and fails (seen with 3.10).
        if self._raises and self.signum:
            self._raises = False  # only one exception: a second would interrupt its handling
            self.check()

    def _watch(self) -> None:
        signum = self._next_request(None)
        self.tell(signum)
        if self.running:
            # Launchers and terminals may send a signal twice at once; only a later one is a second request.
            time.sleep(min(DEBOUNCE_SECONDS, self.grace_seconds))
            while self._next_request(0):
                pass
            self._next_request(self.grace_seconds - DEBOUNCE_SECONDS)
        os._exit(128 + signum)

    def _next_request(self, seconds: float | None) -> int:
        """Next signal that requests a shutdown; 0 if none arrives within ``seconds``."""
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
    """Defer Ctrl-C to the end of a block that must not be interrupted.

    ``KeyboardInterrupt`` is raised after the block. A second Ctrl-C raises it at once, in case the block hangs. Has no effect in
    threads other than the main one, or if SIGINT has another handler.
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
    """Request a signal for this process when its parent dies, for whatever reason (Linux, ``prctl(2)``)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)


def die_with_launcher(environment: LaunchEnvironment) -> None:
    """End this rank when its launcher dies. Call it as early as possible: an earlier death is not noticed."""
    if environment.launcher != "single":
        die_with_parent(signal.SIGKILL if environment.supervisor else signal.SIGTERM)
