"""Lifeline: a TCP connection from every rank to rank 0, so that no rank outlives its group.

Launchers differ in how they end the others when a rank dies, and a rank that waits inside a transport's library may not
notice at all. A thread on each rank sleeps on these connections: when one breaks without a goodbye, or brings the news of
a failure, the process ends, whatever its main thread is doing.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import msgspec

from labinfer.errors import ExitStatus, PeerLost

LENGTH_BYTES = 4
MAX_FRAME = 1 << 20
"""Bytes of a message."""
MAX_HELLO, MAX_SILENT = 1 << 10, 1 << 8
"""Bytes of a follower's first message, and connections that have not said one, at rank 0."""
GRACE_SECONDS = 1.5
"""Time between a connection's breaking and this process's end, in which the failed rank's own account may arrive."""
STATES_SECONDS = 1.0
"""Longest wait of rank 0 for the other ranks' states."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a follower."""

    rank: int
    key: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """An orderly end; the connection's closing is no failure."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """A rank failed; it has printed why itself."""

    text: str
    investigate: bool = False
    """Ask every rank what it is doing before the group ends (a wait passed its limit)."""


class StateRequest(msgspec.Struct, frozen=True, tag="what"):
    """Rank 0 asks what a rank is doing. Its lifeline thread answers, whatever the main thread is stuck in."""


class State(msgspec.Struct, frozen=True, tag="state"):
    """A follower's step and wait, in words."""

    text: str


class StatsRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Rank 0 asks for a rank's stats, which its lifeline thread sends beside whatever runs."""

    detail: int
    """Argument of the rank's ``make_stats``; the lifeline does not know its meaning."""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Bytes that a follower's ``make_stats`` returned."""

    data: bytes


_decoder = msgspec.msgpack.Decoder(Hello | Goodbye | Failure | StateRequest | State | StatsRequest | Stats)
_encoder = msgspec.msgpack.Encoder()


def end_process(text: str) -> None:
    """Say why and end this process at once: other threads may be stuck where no exception reaches them."""
    if text:
        sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
    os._exit(ExitStatus.INTERNAL)


class Lifeline:
    """This rank's end of the connections. ``LifelineServer.accept_all`` makes rank 0's, ``connect`` the others'.

    Args:
        rank: this rank's number in the world.
        connections: by the peer's rank.
        describe: returns this rank's step and wait in words; called from the lifeline's thread.
        end: ends this process, with a text that says why.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        describe: Callable[[], str],
        end: Callable[[str], None] = end_process,
    ):
        self._rank = rank
        self._connections = connections
        self._describe = describe
        self._end = end
        self._states: dict[int, str] = {}
        self.make_stats: Callable[[int], bytes] = lambda detail: b""
        """Called from the lifeline's thread when rank 0 asks for this rank's stats, with the ``detail`` of ``ask_stats``."""
        self.stats: dict[int, bytes] = {}
        """Rank 0: the latest stats of every other rank."""
        self._lock = threading.Lock()
        self._said_goodbye: set[int] = set()
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a script may simply end; one that fails ends by os._exit, which skips this

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        addresses: list[str],
        port: int,
        key: str,
        timeout: float,
        describe: Callable[[], str],
        end: Callable[[str], None] = end_process,
    ) -> Lifeline:
        """Connect a follower to rank 0, at the first of ``addresses`` that answers.

        Raises:
            PeerLost: no address answered within ``timeout`` seconds.
        """
        errors = []
        for address in addresses:
            try:
                connection = socket.create_connection((address, port), timeout=min(timeout, 5.0))
            except OSError as error:
                errors.append(f"{address}: {error}")
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _send(connection, Hello(rank, key))
            return cls(rank, {0: connection}, describe, end)
        raise PeerLost(
            f"rank {rank} cannot reach rank 0 on port {port} ({'; '.join(errors)}); is a firewall between the nodes?"
        )

    def fail(self, text: str, investigate: bool = False) -> None:
        """Tell the others that this rank failed."""
        self._tell_all(Failure(text, investigate))

    def ask_states(self) -> list[str]:
        """Rank 0: every rank's step and wait in words, in rank order; must not be called from the lifeline's own thread."""
        self._states = {0: self._describe()}
        self._tell_all(StateRequest())
        deadline = time.monotonic() + STATES_SECONDS
        while len(self._states) <= len(self._connections) and time.monotonic() < deadline:
            time.sleep(0.01)
        silent = {rank: f"rank {rank}: does not answer (stopped, or its node is gone)" for rank in self._connections}
        return [text for _, text in sorted((silent | self._states).items())]

    def ask_stats(self, detail: int = 0) -> None:
        """Rank 0: have every other rank send its stats, which arrive in ``stats``; does not wait for them."""
        self._tell_all(StatsRequest(detail))

    def close(self) -> None:
        """Say goodbye: from now on this rank's end is no failure."""
        if not self._closing:
            self._closing = True
            self._tell_all(Goodbye())

    def _tell_all(self, message) -> None:
        with self._lock:
            for connection in self._connections.values():
                try:
                    _send(connection, message)
                except OSError:
                    pass  # the peer is gone, which ``_watch`` notices

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for peer, connection in self._connections.items():
            selector.register(connection, selectors.EVENT_READ, peer)
        open_peers = set(self._connections)
        while open_peers:
            for key, _ in selector.select():
                peer = key.data
                message = _receive(key.fileobj)
                if isinstance(message, Goodbye):
                    self._said_goodbye.add(peer)
                elif isinstance(message, StateRequest):
                    self._tell_all(State(self._describe()))
                elif isinstance(message, State):
                    self._states[peer] = message.text
                elif isinstance(message, StatsRequest):
                    self._tell_all(Stats(self.make_stats(message.detail)))
                elif isinstance(message, Stats):
                    self.stats[peer] = message.data
                elif isinstance(message, Failure):
                    self._said_goodbye.add(peer)  # its failure is known: the closing of its connection is no news
                    threading.Thread(target=self._on_failure, args=(message,), daemon=True).start()
                else:  # the connection is closed
                    selector.unregister(key.fileobj)
                    open_peers.discard(peer)
                    if peer not in self._said_goodbye and not self._closing:
                        threading.Thread(target=self._on_silence, args=(peer,), daemon=True).start()

    def _on_failure(self, failure: Failure) -> None:
        text = ""  # rank 0 prints it for all ranks
        if self._rank == 0:
            states = self.ask_states() if failure.investigate else []
            text = "\n".join([*states, failure.text])
            self._tell_all(Failure(failure.text))
        self._finish(text)

    def _on_silence(self, peer: int) -> None:
        time.sleep(GRACE_SECONDS)  # the failed rank's launcher may be about to end all ranks, with its own words
        text = f"labinfer: rank {peer} is gone without a word (killed, or out of memory?); ending all ranks"
        if self._rank == 0:
            self._tell_all(Failure(text))
        self._finish(text if self._rank == 0 or peer == 0 else "")

    def _finish(self, text: str) -> None:
        if not self._ended:
            self._ended = True
            self._end(text)


class LifelineServer:
    """Rank 0's listening socket, open before the followers learn its address.

    Args:
        key: a secret of the group that every ``Hello`` must carry.
    """

    def __init__(self, num_followers: int, key: str):
        self._num_followers = num_followers
        self._key = key
        self._socket = socket.create_server(("", 0), backlog=num_followers + MAX_SILENT)
        self.port = self._socket.getsockname()[1]

    def accept_all(
        self, timeout: float, describe: Callable[[], str], end: Callable[[str], None] = end_process
    ) -> Lifeline:
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
                        f"rank 0 waited {timeout:g} s for ranks {missing} to connect to port {self.port}; is a firewall between the nodes?"
                    ) from None
                try:
                    hello = _decoder.decode(message)
                except msgspec.DecodeError:
                    hello = None
                if not isinstance(hello, Hello) or hello.key != self._key:
                    connection.close()
                    continue
                connection.setblocking(True)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connections[hello.rank] = connection
        self._socket.close()
        return Lifeline(0, connections, describe, end)


def own_addresses() -> list[str]:
    """Names and addresses under which other nodes may reach this node, the most likely first."""
    addresses = [socket.gethostname()]
    try:
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        probe.connect(("192.0.2.1", 9))  # TEST-NET-1: nothing is sent, the kernel only picks the outgoing interface
        addresses.insert(0, probe.getsockname()[0])
        probe.close()
    except OSError:
        pass
    return addresses


def _send(connection: socket.socket, message) -> None:
    data = _encoder.encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


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


def _receive(connection: socket.socket):
    """The next message; None when the connection is closed or its bytes are no message."""
    try:
        header = _receive_exactly(connection, LENGTH_BYTES)
        length = int.from_bytes(header, "little")
        if len(header) < LENGTH_BYTES or length > MAX_FRAME:
            return None
        return _decoder.decode(_receive_exactly(connection, length))
    except (OSError, msgspec.DecodeError):
        return None


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            break
        data += piece
    return data
