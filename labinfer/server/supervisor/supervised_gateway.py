"""SupervisedGateway: a gateway process that outlives the groups of ranks behind it."""

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

MANY_BEATS = 1 << 16
"""As much as a pipe keeps (``pipe(7)``)."""


class SupervisedGateway:
    """The gateway of a supervisor, which keeps the sockets, so that another process can take the place of one that dies, or
    that gives no more signs of life.

    Args:
        directory: for the local socket on which groups come.
        listener: the socket on which clients come.
    """

    def __init__(self, setup: Setup, directory: Path, listener: socket.socket):
        self._setup, self._directory, self._listener = setup, directory, listener
        self._hosts = local_socket.listen(directory)
        self._process: subprocess.Popen | None = None
        self._beats, self._heartbeat, self._next_look = -1, HeartbeatMonitor([self], setup.fault_timeout), 0.0

    def keep(self) -> None:
        """Start it, unless it is there. One that has been silent for long is ended first: that is what a group may have died of."""
        if self.is_alive():
            self._hear()
            if self._heartbeat.age(self) > self._setup.fault_timeout / 2:
                self._end_silent()
        if not self.is_alive():
            self._start()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def is_at_its_end(self) -> bool:
        """Whether the process has ended because a group said that nobody comes any more."""
        return self._process is not None and self._process.poll() == 0

    def has_failed(self) -> bool:
        """Whether it has ended otherwise. One that gives no signs of life is ended here; to be called all the time."""
        if self.is_alive() and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + self._heartbeat.interval
            self._hear()
            if self._heartbeat.silent():
                self._end_silent()
        return not self.is_alive() and not self.is_at_its_end()

    def end(self) -> None:
        """Let it tell its clients that nobody comes any more, and wait for its end."""
        try:
            connection = local_socket.connect(self._directory, self._setup.token, self._setup.model_names)
            with connection:
                GatewayConnection(connection).send(Shutdown())
        except BrokenConnection:
            pass  # its socket is gone
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
        with suppress(BlockingIOError):  # none has come
            if os.read(self._beats, MANY_BEATS):
                self._heartbeat.hear(self)

    def _end_silent(self) -> None:
        logger.error(
            "error: no sign of life of the gateway process for %.0f s (--fault-timeout): it is stopped, or does not get on; it is ended",
            self._heartbeat.age(self),
        )
        self._process.kill()
        self._process.wait()
