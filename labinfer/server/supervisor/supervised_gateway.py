"""SupervisedGateway: a gateway process that outlives the groups of ranks that it serves."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from labinfer.base.errors import BrokenConnection
from labinfer.base.heartbeat import HeartbeatMonitor
from labinfer.server.gateway.options import Setup
from labinfer.server.gateway.process import await_end, start_gateway
from labinfer.server.host.gateway_connection import GatewayConnection
from labinfer.server.link import local_socket
from labinfer.server.link.frames import Shutdown

logger = logging.getLogger(__name__)

MAX_HEARTBEAT_BYTES = 1 << 16
"""Maximum number of bytes per read of heartbeats: the capacity of a pipe (``pipe(7)``)."""


class SupervisedGateway:
    """The gateway process of a supervisor. The supervisor keeps the listening sockets, so that a new process can replace one that
    has died or sends no heartbeats.

    Args:
        directory: private directory of the local socket for engine hosts.
        listener: socket for clients.
    """

    def __init__(self, setup: Setup, directory: Path, listener: socket.socket):
        self._setup, self._directory, self._listener = setup, directory, listener
        self._hosts = local_socket.listen(directory)
        self._process: subprocess.Popen | None = None
        self._beats, self._heartbeat, self._next_look = -1, HeartbeatMonitor([self], setup.fault_timeout), 0.0

    def keep(self) -> None:
        """Start the gateway process unless it runs. If its heartbeats are overdue, it is killed and replaced: a gateway that hangs
        may be the reason why a group of ranks ended."""
        if self.is_alive():
            self._hear()
            if self._heartbeat.age(self) > self._setup.fault_timeout / 2:
                self._end_silent()
        if not self.is_alive():
            self._start()

    def is_alive(self) -> bool:
        """Whether the gateway process runs."""
        return self._process is not None and self._process.poll() is None

    def is_at_its_end(self) -> bool:
        """Whether the gateway process has exited normally, because an engine host sent ``Shutdown``."""
        return self._process is not None and self._process.poll() == 0

    def has_failed(self) -> bool:
        """Whether the gateway process has exited without a ``Shutdown``. Must be called regularly, as it also kills a gateway
        process whose heartbeats are overdue."""
        if self.is_alive() and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + self._heartbeat.interval
            self._hear()
            if self._heartbeat.silent():
                self._end_silent()
        return not self.is_alive() and not self.is_at_its_end()

    def end(self) -> None:
        """Send ``Shutdown`` to the gateway, and wait for the process to exit."""
        try:
            connection = local_socket.connect(self._directory, self._setup.token, self._setup.model_names)
            with connection:
                GatewayConnection(connection).send(Shutdown())
        except BrokenConnection:
            pass  # the process has closed its socket
        if self._process is not None:
            await_end(self._process)

    def _start(self) -> None:
        if self._beats >= 0:
            os.close(self._beats)
        self._beats, write_end = os.pipe()
        os.set_blocking(self._beats, False)
        self._process = start_gateway(self._setup, self._hosts, self._listener, write_end)
        os.close(write_end)
        self._heartbeat = HeartbeatMonitor([self], self._setup.fault_timeout)

    def _hear(self) -> None:
        with suppress(BlockingIOError):  # no heartbeat since the last read
            if os.read(self._beats, MAX_HEARTBEAT_BYTES):
                self._heartbeat.hear(self)

    def _end_silent(self) -> None:
        logger.error(
            "error: no heartbeat from the gateway process for %.0f s (--fault-timeout): it is stopped or hangs; "
            "killing it",
            self._heartbeat.age(self),
        )
        self._process.kill()
        self._process.wait()
