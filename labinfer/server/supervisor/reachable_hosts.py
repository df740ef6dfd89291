"""reachable_hosts: finds the hosts that a launcher can reach, by starting a short command on each."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from labinfer.comm.spmd.processes import descendants
from labinfer.server.supervisor.launch_command import NODE_NAME, LaunchCommand

POLL_SECONDS = 0.05


def reachable_hosts(
    command: LaunchCommand, hosts: Sequence[str], seconds: float, is_over: Callable[[], bool]
) -> dict[str, str]:
    """Start a short command on each host through the launcher. Returns the node name of each host that answers within
    ``seconds``.

    Args:
        is_over: returns whether a signal has arrived; then no further answers are awaited.
    """
    processes = {host: _start(command.print_node_name(host)) for host in hosts}
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in processes.values()) and time.monotonic() < until and not is_over():
        time.sleep(POLL_SECONDS)
    matches = {host: NODE_NAME.search(_end(process)) for host, process in processes.items()}
    return {host: match[1] for host, match in matches.items() if match}


def _start(command: list[str]) -> subprocess.Popen:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it
    )
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _end(process: subprocess.Popen) -> str:
    """Return the output of ``process`` so far. If it still runs, kill it and its descendants."""
    with process.stdout as stdout:
        said = (stdout.read() or b"").decode(errors="replace")
    if process.poll() is None:
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(OSError):  # the process has just ended
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return said
