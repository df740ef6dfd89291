"""HealthServer: rank 0's listening socket, on which the other ranks' health channels come."""

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

MAX_HELLO, MAX_SILENT = 1 << 10, 1 << 8
"""Bytes of a follower's first message, and connections that have not said one, at rank 0."""


class HealthServer:
    """Rank 0's listening socket, open before the followers learn its address.

    Args:
        key: a secret of the group that every ``RegisterRank`` must carry.
        ports: as ``listen`` takes them.

    Raises:
        UserError: all of ``ports`` are taken.
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
        """Wait for every follower. A connection without the key is closed.

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
    """Connections with the first message of each, whichever comes first: one that says nothing holds up nobody.

    Those that have not said one are closed at the end, and the oldest of them when there are too many.
    """
    silent: dict[socket.socket, bytes] = {}  # with what they have said so far
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
                        with suppress(OSError):  # it has gone already
                            connection, _ = server.accept()
                            connection.setblocking(False)
                            selector.register(connection, selectors.EVENT_READ)
                            silent[connection] = b""
                    elif connection in silent:
                        before = silent[connection]
                        silent[connection] = said = before + _receive_ready(connection, _num_missing(before))
                        if said == before or _num_missing(said) > MAX_HELLO:  # closed, or no follower
                            let_go(connection).close()
                        elif not _num_missing(said):
                            yield let_go(connection), said[LENGTH_BYTES:]
        finally:
            for connection in silent:
                connection.close()


def _num_missing(said: bytes) -> int:
    """Bytes that are to be read next of a message that begins with these."""
    length = int.from_bytes(said[:LENGTH_BYTES], "little")
    return LENGTH_BYTES - len(said) if len(said) < LENGTH_BYTES else LENGTH_BYTES + length - len(said)


def _receive_ready(connection: socket.socket, count: int) -> bytes:
    """Bytes of a connection that is ready; none when it is closed or broken."""
    try:
        return connection.recv(count)
    except OSError:
        return b""
