"""The local socket on which a gateway listens for its engine host, and how a host comes to it."""

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
"""Hosts that wait until the one before is gone."""


def listen(directory: Path) -> socket.socket:
    """A socket in ``directory``, which nobody else may enter.

    Raises:
        UserError: the directory's name is too long for a socket in it.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(directory / NAME))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot make a local socket in {directory}: {error.strerror or error}; set TMPDIR to another directory"
        ) from None
    listener.listen(BACKLOG)
    return listener


def connect(directory: Path, token: str, model_names: list[str]) -> socket.socket:
    """A connection to the gateway that listens in ``directory``, with the first word said.

    Args:
        token: the secret that whoever started the gateway gave it.
        model_names: the models that will be attached.

    Raises:
        BrokenConnection: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(directory / NAME))
        connection.sendall(pack(RegisterHost(labinfer.__version__, token, model_names, PLUGINS.identities())))
    except OSError as error:
        connection.close()
        raise BrokenConnection(f"no gateway listens in {directory}: {error.strerror or error}") from None
    return connection
