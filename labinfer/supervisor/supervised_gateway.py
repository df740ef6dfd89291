"""SupervisedGateway: a gateway process that outlives the groups of ranks behind it."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from labinfer.errors import BrokenLink
from labinfer.gateway.options import Setup
from labinfer.gateway.process import await_end, start_gateway
from labinfer.host.gateway_link import GatewayLink
from labinfer.link import local_socket
from labinfer.link.frames import Bye
from labinfer.spmd.processes import is_stopped


class SupervisedGateway:
    """The gateway of a supervisor, which keeps the sockets, so that another process can take the place of one that dies.

    Args:
        directory: for the local socket on which groups come.
        listener: the socket on which clients come.
    """

    def __init__(self, setup: Setup, directory: Path, listener: socket.socket):
        self._setup, self._directory, self._listener = setup, directory, listener
        self._hosts = local_socket.listen(directory)
        self._process: subprocess.Popen | None = None

    def keep(self) -> None:
        """Start it, unless it is there. One that is stopped is ended first."""
        if self.is_alive() and is_stopped(self._process.pid):
            self._process.kill()
            self._process.wait()
        if not self.is_alive():
            self._process = start_gateway(self._setup, self._hosts, self._listener)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def is_at_its_end(self) -> bool:
        """Whether the process has ended because a group said that nobody comes any more."""
        return self._process is not None and self._process.poll() == 0

    def has_failed(self) -> bool:
        """Whether it has ended otherwise."""
        return not self.is_alive() and not self.is_at_its_end()

    def end(self) -> None:
        """Let it tell its clients that nobody comes any more, and wait for its end."""
        try:
            connection = local_socket.connect(self._directory, self._setup.token, self._setup.model_names)
            with connection:
                GatewayLink(connection).send(Bye())
        except BrokenLink:
            pass  # its socket is gone
        if self._process is not None:
            await_end(self._process)
