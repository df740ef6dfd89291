"""Sockets on which ranks of other machines connect to this one, over IPv6 and IPv4, on ports that a firewall may have to open."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from labinfer.base.errors import UserError

ANY_PORT = (0,)
"""The system chooses one that is free."""


def listen(ports: Sequence[int], backlog: int) -> socket.socket:
    """A listening socket on all addresses of this machine.

    Args:
        ports: of ``--port-range``; the first free one is taken. Where there are none, the system chooses.
        backlog: connections that may wait to be accepted.

    Raises:
        UserError: all of ``ports`` are taken.
    """
    for port in ports or ANY_PORT:
        try:
            return _listen_on(port, backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or not ports:
                raise
            reason = error.strerror
    raise UserError(
        f"no port of --port-range {ports[0]}-{ports[-1]} can be listened on: {str(reason).partition(' (')[0]}; give a wider one"
    )


def free_port(ports: Sequence[int] = ()) -> int:
    """A TCP port that nobody listens on now, of ``ports`` where there are some.

    Raises:
        UserError: all of ``ports`` are taken.
    """
    with listen(ports, backlog=1) as probe:
        return probe.getsockname()[1]


def _listen_on(port: int, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
    return socket.create_server(("", port), backlog=backlog)  # the system was told to do without IPv6
