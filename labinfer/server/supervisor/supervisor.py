"""Supervisor: starts a group of ranks and restarts it when it dies, behind a gateway that outlives it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from labinfer.base.clock import Clock
from labinfer.base.errors import ExitStatus, UserError
from labinfer.base.standard_error import StandardError, is_terminal
from labinfer.comm.spmd.environment import NODES_FILE, STATUS_FILE
from labinfer.server.supervisor import child
from labinfer.server.supervisor.restarts import Restarts
from labinfer.server.supervisor.supervised_gateway import SupervisedGateway

logger = logging.getLogger(__name__)

REFUSED_SECONDS, REFUSALS = 20.0, 3
"""If ``REFUSALS`` runs of the launcher in a row end within ``REFUSED_SECONDS``, with one exit status and before all ranks have
connected, the launcher has refused its arguments. It is then not restarted."""
POLL_SECONDS = 0.05
"""Seconds between two checks of the group, the gateway and signals."""
DRAIN_SECONDS = 1.0
"""Seconds to wait for the rest of the log of a group that has ended."""
LOG_BYTES = 1 << 16
"""Maximum number of bytes per read of the group's log: the capacity of a pipe (``pipe(7)``)."""


class Supervisor:
    """Starts a group of ranks, and restarts it until it ends normally, a signal arrives, or the restart limit is
    reached.

    Args:
        command: starts the group.
        next_command: returns the command that restarts the group. It may be slow, and raise a ``UserError``.
        directory: private directory. Rank 0 writes two files there: one when all ranks have connected, and one with rank 0's exit
            status, which launchers hide.
        environment: environment variables of the group.
        restarts: restart limit and back-off.
        signum: returns the number of the signal that has requested the end; 0 if none has.
        gateway: the group's gateway process; None for a job.
    """

    def __init__(
        self,
        command: list[str],
        next_command: Callable[[], list[str]],
        *,
        directory: Path,
        environment: dict[str, str],
        restarts: Restarts,
        signum: Callable[[], int],
        gateway: SupervisedGateway | None,
        clock: Clock,
    ):
        self._command, self._next_command, self._environment = command, next_command, environment
        self._status_file, self._nodes_file = directory / STATUS_FILE, directory / NODES_FILE
        self._restarts, self._signum, self._gateway, self._clock = restarts, signum, gateway, clock

    def run(self) -> int:
        """Run one group after another until the supervisor ends. Returns the exit status of this process."""
        command, status, num_refusals = self._command, None, 0
        while True:
            begin, before = self._clock(), status
            status = self._run_group(command)
            if self._signum():
                return 128 + self._signum()
            if (own := self._own_status()) is not None:
                if own == ExitStatus.USAGE:
                    logger.error("error: the ranks rejected their options or input; not restarting")
                return own
            if self._gateway is not None and self._gateway.is_at_its_end():
                return status  # the ranks were asked to end, and have ended
            lived = self._clock() - begin
            num_refusals = 0 if lived >= REFUSED_SECONDS else num_refusals + 1 if status == before else 1
            if num_refusals == REFUSALS and not self._nodes_file.exists():
                logger.error(
                    "error: the group exited %d times %s before its ranks connected; not restarting",
                    REFUSALS,
                    _how(status),
                )
                return ExitStatus.INTERNAL
            pause = self._restarts.next_pause(lived)
            if pause is None:
                logger.error("error: the group exited %s after %.0f s; not restarting", _how(status), lived)
                return ExitStatus.INTERNAL
            logger.warning(
                "the group exited %s after %.0f s; restarting%s (restart %d)",
                _how(status),
                lived,
                f" in {pause:g} s" if pause else "",
                self._restarts.count,
            )
            self._wait(pause)
            try:
                command = self._next_command()
            except UserError as error:
                logger.error("error: %s", error)
                return ExitStatus.INTERNAL
            if self._signum():
                return 128 + self._signum()

    def _run_group(self, command: list[str]) -> int:
        """Start the group and wait for its end; return the launcher's exit status."""
        self._status_file.unlink(missing_ok=True)
        if self._gateway is not None:
            self._gateway.keep()
        process = subprocess.Popen(
            [sys.executable, "-E", "-S", child.__file__, str(os.getpid()), *command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stderr=None if is_terminal() else subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the group only through this process
        )
        if process.stderr is not None:
            log = threading.Thread(target=_pass_on_log, args=(process.stderr,), name="log", daemon=True)
            log.start()
        is_told = False
        while process.poll() is None:
            if not is_told and (signum := self._signum()):
                is_told = True
                process.send_signal(signum)
            elif not is_told and self._gateway is not None and self._gateway.has_failed():
                logger.warning("the gateway has exited; restarting the group with a new one")
                is_told = True
                process.kill()
            time.sleep(POLL_SECONDS)
        if process.stderr is not None:
            log.join(DRAIN_SECONDS)  # bounded, as processes that the group left behind may keep the pipe open
        return process.returncode

    def _own_status(self) -> int | None:
        """Exit status that rank 0 wrote when it ended normally; None if it wrote none."""
        try:
            return int(self._status_file.read_text())
        except (OSError, ValueError):
            return None

    def _wait(self, seconds: float) -> None:
        until = self._clock() + seconds
        while self._clock() < until and not self._signum():
            self._clock.sleep(POLL_SECONDS)


def _pass_on_log(pipe: IO[bytes]) -> None:
    """Copy the group's log to standard error, so that the pipe of the log never fills up or breaks: MPICH's mpirun ends its ranks
    if it cannot write their log."""
    log = StandardError()
    with pipe:
        while data := os.read(pipe.fileno(), LOG_BYTES):
            log.write_bytes(data)


def _how(status: int) -> str:
    return f"on {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
