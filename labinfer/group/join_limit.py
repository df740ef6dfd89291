"""A time limit for the ranks' meeting, before they have anything over which they could hear of each other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from labinfer.comm.lifeline import end_process
from labinfer.spmd.environment import LaunchEnvironment
from labinfer.spmd.processes import stopped_siblings

TRANSPORT_SECONDS = 2.0
"""Transports with a time limit of their own may say first what they waited for."""


@contextmanager
def time_limit_for_joining(environment: LaunchEnvironment, timeout: float) -> Iterator[None]:
    """End this process where the ranks have not met after ``timeout`` seconds: MPI would wait for ever."""

    def end() -> None:
        stopped = stopped_siblings()
        what = f"; stopped: process {' and '.join(map(str, stopped))}" if stopped else ""
        end_process(
            f"labinfer: error: rank {environment.rank} on {environment.node_name} waited {timeout:g} s (--timeout) for the "
            f"other {environment.world_size - 1} ranks to join{what}",
            lambda: kill(stopped),
        )

    def kill(pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(timeout + TRANSPORT_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
