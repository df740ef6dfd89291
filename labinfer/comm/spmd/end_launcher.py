"""end_launcher: kills an mpirun that waits forever for a machine that is cut off.

Runs as a process beside the exiting rank that starts it: ``python -m labinfer.comm.spmd.end_launcher PID``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import labinfer
from labinfer.comm.spmd.processes import ancestor, descendants, start_time

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
EXIT_TIMEOUT_SECONDS = 3.0
"""Seconds that a launcher has to exit before it is killed."""
POLL_SECONDS = 0.1


def end_launcher() -> str:
    """Kill the mpirun above this process and its descendants, if it is still running after ``EXIT_TIMEOUT_SECONDS``.

    Returns a text that describes the action; empty without an mpirun, as on machines that mpirun reaches by ssh.
    """
    pid = ancestor(LAUNCHERS)
    if not pid:
        return ""
    subprocess.Popen(
        [sys.executable, "-m", "labinfer.comm.spmd.end_launcher", str(pid)],
        cwd=Path(labinfer.__file__).parent.parent,  # so that Python finds this package
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # mpirun waits for the end of its ranks' output
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return f", and mpirun (process {pid}) if it does not exit within {EXIT_TIMEOUT_SECONDS:g} s"


def main(pid: int) -> None:
    """Wait for a launcher to exit; after ``EXIT_TIMEOUT_SECONDS`` kill it and its descendants."""
    begun, until = start_time(pid), time.monotonic() + EXIT_TIMEOUT_SECONDS
    while begun and start_time(pid) == begun:
        if time.monotonic() > until:
            for each in [pid, *descendants(pid)]:
                if each != os.getpid():
                    with suppress(OSError):  # the process has ended meanwhile
                        os.kill(each, signal.SIGKILL)
            return
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
