"""End an mpirun that does not end by itself: it waits without a limit for the answer of a machine that is cut off.

It runs beside the rank that starts it, which is about to end: ``python -m labinfer.comm.spmd.end_launcher PID``.
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
PATIENCE_SECONDS = 3.0
"""From now to the end of a launcher that does not end by itself."""
LOOK_SECONDS = 0.1


def end_launcher() -> str:
    """Have the mpirun above this process ended, with what it has started, if it is still there in some seconds.

    Returns what will be done, in words; nothing where there is no mpirun, as on machines that it reaches by ssh.
    """
    pid = ancestor(LAUNCHERS)
    if not pid:
        return ""
    subprocess.Popen(
        [sys.executable, "-m", "labinfer.comm.spmd.end_launcher", str(pid)],
        cwd=Path(labinfer.__file__).parent.parent,  # so that it finds this package
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # as mpirun waits for the end of its ranks' output
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return f", and mpirun (process {pid}), too, where it waits for them for more than {PATIENCE_SECONDS:g} s"


def main(pid: int) -> None:
    """Wait for the end of a launcher, and kill it, and what is below it, where that takes too long."""
    begun, until = start_time(pid), time.monotonic() + PATIENCE_SECONDS
    while begun and start_time(pid) == begun:
        if time.monotonic() > until:
            for each in [pid, *descendants(pid)]:
                if each != os.getpid():
                    with suppress(OSError):  # it has just ended
                        os.kill(each, signal.SIGKILL)
            return
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
