"""Rank 0's hold on the gateway process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import labinfer
from labinfer.config import ServerOptions
from labinfer.server.frames import Setup, pack

GATEWAY = "labinfer.server.gateway"
END_SECONDS = 6.0
"""How long it may take for its last words."""


class GatewayProcess:
    """A gateway that runs.

    Args:
        listener: bound and listening.
        cpus: that it may run on; this process may have bound itself to fewer.
    """

    def __init__(
        self, listener: socket.socket, options: ServerOptions, model_names: list[str], cpus: list[int], log_level: str
    ):
        self.connection, theirs = socket.socketpair()
        with theirs, listener:
            descriptors = (theirs.fileno(), listener.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", GATEWAY, *map(str, descriptors)],
                pass_fds=descriptors,
                cwd=Path(labinfer.__file__).parent.parent,  # so that it finds this package
                stdin=subprocess.DEVNULL,
            )
        self.connection.sendall(pack(Setup(options, model_names, cpus, log_level)))

    def end(self) -> None:
        """Wait for its end; it comes when the connection closes."""
        self.connection.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
