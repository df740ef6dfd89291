"""Listening sockets for ranks of other machines, over IPv6 and IPv4, on ports of ``--port-range``."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from labinfer.base.errors import UserError

ANY_PORT = (0,)
"""Ports of ``listen`` that let the system choose a free one."""


def listen(ports: Sequence[int], backlog: int) -> socket.socket:
    """Listening socket on all addresses of this machine.

    Args:
        ports: ports of ``--port-range``; the first free one is used. Empty lets the system choose.
        backlog: maximum number of connections that wait to be accepted.

    Raises:
        UserError: all of ``ports`` are in use.
    """
    for port in ports or ANY_PORT:
        try:
            return _listen_on(port, backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or not ports:
                raise
            reason = error.strerror
    raise UserError(
        f"no port in --port-range {ports[0]}-{ports[-1]} is available: {str(reason).partition(' (')[0]}; give a "
        "wider range"
    )


def free_port(ports: Sequence[int] = ()) -> int:
    """TCP port that is free now, out of ``ports`` unless empty.

    Raises:
        UserError: all of ``ports`` are in use.
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
    return socket.create_server(("", port), backlog=backlog)  # the system has IPv6 disabled
