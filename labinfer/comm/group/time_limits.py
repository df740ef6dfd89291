"""Timeouts for phases without health channels: before the ranks have met, and after the ``Goodbye`` message."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from labinfer.base.errors import UserError
from labinfer.base.standard_error import write_error
from labinfer.comm.health_channel import FIREWALL, end_process
from labinfer.comm.spmd.environment import LaunchEnvironment
from labinfer.comm.spmd.processes import stopped_ancestor, stopped_siblings

TRANSPORT_SECONDS = 2.0
"""Seconds added to the timeout, so that a transport with a timeout of its own reports the error first."""
POLL_SECONDS = 0.5
"""Seconds between two checks for stopped ranks."""


@contextmanager
def time_limit_for_joining(environment: LaunchEnvironment, timeout: float) -> Iterator[None]:
    """End this process if the ranks have not met after ``timeout`` seconds: MPI would wait forever. The error names
    stopped (suspended) ranks of this machine and a stopped launcher. Kills these ranks, as launchers would wait long
    for them."""

    def end(problem: str) -> None:
        stopped, above = stopped_siblings(), stopped_ancestor()
        named = [_processes(stopped)] if stopped else []
        named += [f"process {above}, which started the ranks"] if above else []
        what = f"; stopped: {', '.join(named)}" if named else ""
        end_process(f"labinfer: error: {problem}{what}", lambda: _kill(stopped))

    def end_late() -> None:
        problem = (
            f"rank {environment.rank} on {environment.node_name} waited {timeout:g} s (--timeout) for the "
            f"other {environment.world_size - 1} ranks to join{'' if environment.is_one_node else f'; {FIREWALL}'}"
        )
        end(problem)

    timer = threading.Timer(timeout + TRANSPORT_SECONDS, end_late)
    timer.daemon = True
    timer.start()
    try:
        yield
    except UserError as error:
        if stopped_siblings() or stopped_ancestor():
            end(str(error))
        raise
    finally:
        timer.cancel()


@contextmanager
def time_limit_for_leaving(environment: LaunchEnvironment, timeout: float) -> Iterator[None]:
    """Kill ranks of this machine that are stopped (suspended) for ``timeout`` seconds within the block, in which all ranks leave the
    transport.

    Ranks that run but are late have no timeout: a script may do other work before it closes its LLM.
    """
    left = threading.Event()

    def watch() -> None:
        since: dict[int, float] = {}  # time at which each process was first seen stopped
        while not left.wait(POLL_SECONDS):
            now = time.monotonic()
            since = {pid: since.get(pid, now) for pid in stopped_siblings()}
            if late := [pid for pid, begun in since.items() if now - begun >= timeout]:
                write_error(
                    f"labinfer: error: rank {environment.rank} on {environment.node_name} waited {timeout:g} s "
                    f"(--fault-timeout) for the others to exit; stopped: {_processes(late)}; ending all ranks\n"
                )
                _kill(late)

    threading.Thread(target=watch, name="leaving", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def _processes(pids: list[int]) -> str:
    return f"process {' and '.join(map(str, pids))}"


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            os.kill(pid, signal.SIGKILL)
