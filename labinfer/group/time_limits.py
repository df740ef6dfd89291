"""Time limits for calls that a transport's library may not return from: while the ranks meet, and when they leave."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from labinfer.comm.lifeline import end_process
from labinfer.spmd.environment import LaunchEnvironment
from labinfer.spmd.processes import stopped_siblings

TRANSPORT_SECONDS = 2.0
"""Transports with a time limit of their own may say first what they waited for."""


@contextmanager
def time_limit_for_joining(environment: LaunchEnvironment, timeout: float) -> Iterator[None]:
    """End this process where the ranks have not met after ``timeout`` seconds: MPI would wait for ever."""
    what = f"waited {timeout:g} s (--timeout) for the other {environment.world_size - 1} ranks to join"
    timer = threading.Timer(timeout + TRANSPORT_SECONDS, _end, (environment, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave_at_exit(environment: LaunchEnvironment, leave: Callable[[], None], timeout: float) -> None:
    """Call ``leave`` when this process ends in order, and end it at once where that takes longer than ``timeout`` seconds.

    The thread that watches the time is started now, as none may be at the end of a process (Python 3.12).
    """
    begun, done = threading.Event(), threading.Event()
    what = f"waited {timeout:g} s (--fault-timeout) for the other {environment.world_size - 1} ranks to leave"

    def watch() -> None:
        begun.wait()
        if not done.wait(timeout):
            _end(environment, what)

    def leave_watched() -> None:
        begun.set()
        leave()
        done.set()

    threading.Thread(target=watch, name="leaving", daemon=True).start()
    atexit.register(leave_watched)


def _end(environment: LaunchEnvironment, what: str) -> None:
    """End this process, with ranks of this machine that are stopped."""
    stopped = stopped_siblings()
    names = f"; stopped: process {' and '.join(map(str, stopped))}" if stopped else ""

    def kill() -> None:
        for pid in stopped:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    end_process(f"labinfer: error: rank {environment.rank} on {environment.node_name} {what}{names}", kill)
