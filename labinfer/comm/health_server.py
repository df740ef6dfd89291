"""HealthServer: rank 0's listening socket for the health channels of the other ranks."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress

from labinfer.base.errors import PeerLost
from labinfer.comm.health_channel import FIREWALL, FaultOptions, HealthChannel, end_process
from labinfer.comm.health_messages import LENGTH_BYTES, RegisterRank, decode
from labinfer.comm.listening import listen

MAX_REGISTRATION_BYTES, MAX_SILENT = 1 << 10, 1 << 8
"""Maximum bytes of a follower's first message, and maximum number of connections that have not sent one."""


class HealthServer:
    """Rank 0's listening socket, open before the followers learn its address.

    Args:
        key: secret of the group, required in every ``RegisterRank``.
        ports: allowed ports; see ``listen``.

    Raises:
        UserError: all of ``ports`` are in use.
    """

    def __init__(self, num_followers: int, key: str, ports: Sequence[int] = ()):
        self._num_followers = num_followers
        self._key = key
        self._socket = listen(ports, backlog=num_followers + MAX_SILENT)
        self.port = self._socket.getsockname()[1]

    def accept_all(
        self,
        timeout: float,
        describe: Callable[[], str],
        end: Callable[[str, Callable[[], None]], None] = end_process,
        faults: FaultOptions = FaultOptions(),  # noqa: B008 - frozen
    ) -> HealthChannel:
        """Wait for all followers. Closes connections without the key.

        Raises:
            PeerLost: a follower did not connect within ``timeout`` seconds.
        """
        connections: dict[int, socket.socket] = {}
        with closing(_first_messages(self._socket, time.monotonic() + timeout)) as messages:
            while len(connections) < self._num_followers:
                try:
                    connection, message = next(messages)
                except StopIteration:
                    missing = sorted(set(range(1, self._num_followers + 1)) - set(connections))
                    raise PeerLost(
                        f"rank 0 waited {timeout:g} s for ranks {missing} to connect to its port {self.port}; {FIREWALL}"
                    ) from None
                registration = decode(message)
                if not isinstance(registration, RegisterRank) or registration.key != self._key:
                    connection.close()
                    continue
                connection.setblocking(True)
                connections[registration.rank] = connection
        self._socket.close()
        return HealthChannel(0, connections, describe, end, faults)


def _first_messages(server: socket.socket, deadline: float) -> Iterator[tuple[socket.socket, bytes]]:
    """Connections with the first message of each, in the order of completion. A silent connection does not block others.

    Silent connections are closed at the end; above ``MAX_SILENT`` of them, the oldest is closed.
    """
    silent: dict[socket.socket, bytes] = {}  # silent connections, with the bytes received so far
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def let_go(connection: socket.socket) -> socket.socket:
            del silent[connection]
            selector.unregister(connection)
            return connection

        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    connection = key.fileobj
                    if connection is server:
                        if len(silent) == MAX_SILENT:
                            let_go(next(iter(silent))).close()
                        with suppress(OSError):  # the peer has disconnected already
                            connection, _ = server.accept()
                            connection.setblocking(False)
                            selector.register(connection, selectors.EVENT_READ)
                            silent[connection] = b""
                    elif connection in silent:
                        before = silent[connection]
                        silent[connection] = said = before + _receive_ready(connection, _num_missing(before))
                        if said == before or _num_missing(said) > MAX_REGISTRATION_BYTES:  # closed, or not a follower
                            let_go(connection).close()
                        elif not _num_missing(said):
                            yield let_go(connection), said[LENGTH_BYTES:]
        finally:
            for connection in silent:
                connection.close()


def _num_missing(said: bytes) -> int:
    """Bytes still missing of a message's length prefix, or of the message, after ``said``."""
    length = int.from_bytes(said[:LENGTH_BYTES], "little")
    return LENGTH_BYTES - len(said) if len(said) < LENGTH_BYTES else LENGTH_BYTES + length - len(said)


def _receive_ready(connection: socket.socket, count: int) -> bytes:
    """Read from a connection that is ready; empty if it is closed or broken."""
    try:
        return connection.recv(count)
    except OSError:
        return b""
