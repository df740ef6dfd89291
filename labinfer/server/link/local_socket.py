"""Local socket between a gateway, which listens, and its engine host, which connects."""

from __future__ import annotations

import socket
from pathlib import Path

import labinfer
from labinfer.base.errors import BrokenConnection, UserError
from labinfer.base.plugins import PLUGINS
from labinfer.server.link.frames import RegisterHost
from labinfer.server.link.framing import pack

NAME = "engine.socket"
BACKLOG = 8
"""Maximum number of engine hosts that wait until the current host has ended; the listen backlog of the socket."""


def listen(directory: Path) -> socket.socket:
    """Open a listening socket in ``directory``, which must be private to this user.

    Raises:
        UserError: the path is too long for a socket.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(directory / NAME))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot create a local socket in {directory}: {error.strerror or error}; set TMPDIR to another directory"
        ) from None
    listener.listen(BACKLOG)
    return listener


def connect(directory: Path, token: str, model_names: list[str]) -> socket.socket:
    """Connect to the gateway that listens in ``directory``, and send ``RegisterHost``.

    Args:
        token: secret of the gateway.
        model_names: names of the models that the engine host will attach.

    Raises:
        BrokenConnection: no gateway listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(directory / NAME))
        connection.sendall(pack(RegisterHost(labinfer.__version__, token, model_names, PLUGINS.identities())))
    except OSError as error:
        connection.close()
        raise BrokenConnection(f"no gateway is listening in {directory}: {error.strerror or error}") from None
    return connection
