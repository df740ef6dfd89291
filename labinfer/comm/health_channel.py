"""HealthChannel: a TCP connection from every rank to rank 0, so that no rank outlives its group.

Launchers differ in how they end the other ranks when one dies, and a rank that waits inside a transport's library may not notice.
A thread on each rank watches these connections. The process ends if one closes without a goodbye, sends no heartbeats, or
reports a failure, whatever the main thread is doing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from labinfer.base.errors import ExitStatus, PeerLost
from labinfer.base.heartbeat import DEFAULT_TIMEOUT, HeartbeatMonitor
from labinfer.base.standard_error import write_lines
from labinfer.comm.health_messages import (
    Failure,
    Goodbye,
    Inbox,
    RankHeartbeat,
    RegisterRank,
    Signal,
    State,
    StateRequest,
    StatsReply,
    StatsRequest,
    send,
)

CONNECT_SECONDS = 5.0
"""Connection timeout for each address of rank 0."""
FIREWALL = (
    "a firewall may block the ports of the ranks: open them, or set --port-range LOW-HIGH to open ports "
    "(docs/operations.md)"
)
GRACE_SECONDS = 1.5
"""Delay between the loss of a connection and the end of this process, in which the failed rank's own error may arrive."""
STATES_SECONDS = 1.0
"""Time that rank 0 waits for the states of the other ranks."""
PRECEDENCE_SECONDS = 1.0
"""Delay of ranks above 1 when rank 0 is silent: rank 1 reports it first and ends the processes that it can."""


def end_process(text: str, last: Callable[[], None] = lambda: None) -> None:
    """Print the reason and exit at once: other threads may hang where no exception reaches them.

    Args:
        last: called after printing, to end other processes: a launcher may kill this process as soon as another one ends.
    """
    if text:
        write_lines(text)
    last()
    os._exit(ExitStatus.INTERNAL)


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """Timeout of silent ranks, and information about the ranks for reports."""

    timeout: float = DEFAULT_TIMEOUT
    """Heartbeat timeout in seconds."""
    hosts: Sequence[str] = ()
    """Host name of each rank, by rank."""
    local_pids: Mapping[int, int] = field(default_factory=dict)
    """Process ids of the other ranks on this machine, by rank. This process may kill them."""
    end_launcher: Callable[[], str] = lambda: ""
    """Called on rank 0 before it exits because ranks of other machines are silent: the launcher may wait for them forever. Returns a
    text that describes the action."""

    def name(self, rank: int) -> str:
        """Text that names ``rank`` and its machine."""
        return f"rank {rank} on {self.hosts[rank]}" if rank < len(self.hosts) else f"rank {rank}"

    def kill(self, rank: int) -> None:
        """Kill a silent rank of this machine. SIGKILL, as a stopped process handles no other signal."""
        if rank in self.local_pids:
            with contextlib.suppress(OSError):
                os.kill(self.local_pids[rank], signal.SIGKILL)


class HealthChannel:
    """This rank's end of the connections. ``HealthServer.accept_all`` makes rank 0's end, ``connect`` a follower's end.

    Args:
        rank: world rank of this process.
        connections: open connections, by the peer's rank.
        describe: returns this rank's step and wait as a text; called from the health channel's thread.
        end: ends this process, after printing a text.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        describe: Callable[[], str],
        end: Callable[[str, Callable[[], None]], None] = end_process,
        faults: FaultOptions = FaultOptions(),  # noqa: B008 - frozen
    ):
        self._rank = rank
        self._connections = connections
        self._describe = describe
        self._end = end
        self._faults = faults
        self._heartbeat = HeartbeatMonitor(sorted(connections), faults.timeout)
        self._last_words: dict[int, str] = {}  # last reported state of each peer
        for connection in connections.values():  # a peer that accepts no data for this long counts as lost
            connection.settimeout(3 * self._heartbeat.interval)
        self._states: dict[int, str] = {}
        self.make_stats: Callable[[int], bytes] = lambda detail: b""
        """Called from the health channel's thread when rank 0 requests stats, with the ``detail`` of ``ask_stats``."""
        self.stats: dict[int, bytes] = {}
        """Rank 0: latest stats of every other rank."""
        self.on_signal: Callable[[str, int], None] = lambda rank, signum: None
        """Called in its own thread when another rank reports a signal, with that rank's name and the signal number."""
        self._lock = threading.Lock()
        self._said_goodbye: set[int] = set()
        self._closing = False
        self._ending = threading.Lock()  # acquired by the thread that ends the process, never released
        self._thread = threading.Thread(target=self._watch, name="health channel", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a script may simply exit; a failing one exits with os._exit, which skips this

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
        end: Callable[[str, Callable[[], None]], None] = end_process,
        faults: FaultOptions = FaultOptions(),  # noqa: B008 - frozen
    ) -> HealthChannel:
        """Connect a follower to rank 0, at the first of ``addresses`` that answers. Rank 0 already listens.

        Raises:
            PeerLost: no address answered within ``timeout`` seconds.
        """
        errors = []
        for address in addresses:
            try:
                connection = socket.create_connection((address, port), timeout=min(timeout, CONNECT_SECONDS))
                send(connection, RegisterRank(rank, key))
            except OSError as error:
                errors.append(f"{address}: {error}")
                continue
            return cls(rank, {0: connection}, describe, end, faults)
        raise PeerLost(f"rank {rank} cannot reach rank 0 on port {port} ({'; '.join(errors)}); {FIREWALL}")

    def fail(self, text: str, investigate: bool = False) -> None:
        """Tell the other ranks that this rank failed."""
        self._tell_all(Failure(text, investigate))

    def tell_signal(self, signum: int) -> None:
        """Tell the other ranks that this rank got SIGINT or SIGTERM."""
        self._tell_all(Signal(signum))

    def ask_states(self) -> list[str]:
        """Rank 0: steps and waits of all ranks as texts, in rank order. Must not be called from the health channel's thread."""
        self._states = {0: self._describe()}
        self._tell_all(StateRequest())
        deadline = time.monotonic() + STATES_SECONDS
        while len(self._states) <= len(self._connections) and time.monotonic() < deadline:
            time.sleep(0.01)
        silent = {rank: f"rank {rank}: no answer (stopped, or its node is down)" for rank in self._connections}
        return [text for _, text in sorted((silent | self._states).items())]

    def ask_stats(self, detail: int = 0) -> None:
        """Rank 0: request stats from every other rank without waiting; they arrive in ``stats``."""
        self._tell_all(StatsRequest(detail))

    def close(self) -> None:
        """Send a ``Goodbye``, so that the peers do not report the end of this rank as a failure."""
        if not self._closing:
            self._closing = True
            atexit.unregister(self.close)
            self._tell_all(Goodbye())
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # the peer is gone
                    connection.shutdown(
                        socket.SHUT_WR
                    )  # the peer reads end of file; this side does once the peer closes, too

    def _tell_all(self, message) -> None:
        with self._lock:
            for connection in self._connections.values():
                try:
                    send(connection, message)
                except OSError:  # the peer is gone or blocked; after a partial message the connection is useless
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        inboxes = {peer: Inbox(connection) for peer, connection in self._connections.items()}
        for peer, connection in self._connections.items():
            selector.register(connection, selectors.EVENT_READ, peer)
        next_beat = 0.0
        while inboxes:
            for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                peer = key.data
                self._heartbeat.hear(peer)
                messages = inboxes[peer].receive()
                for message in messages or ():
                    self._take(peer, message)
                if messages is None:  # the connection is closed
                    selector.unregister(key.fileobj)
                    del inboxes[peer]
                    self._heartbeat.forget(peer)
                    if peer not in self._said_goodbye and not self._closing:
                        threading.Thread(target=self._on_closed, args=(peer,), daemon=True).start()
            if time.monotonic() < next_beat:
                continue
            next_beat = time.monotonic() + self._heartbeat.interval
            if not self._closing:
                self._tell_all(RankHeartbeat(self._describe()))
                if silent := self._heartbeat.silent():
                    threading.Thread(target=self._on_silent, args=(silent,), daemon=True).start()
        selector.close()
        with self._lock:
            for connection in self._connections.values():
                connection.close()

    def _take(self, peer: int, message) -> None:
        if isinstance(message, RankHeartbeat):
            self._last_words[peer] = message.state
        elif isinstance(message, Goodbye):
            self._said_goodbye.add(peer)
            self._heartbeat.forget(peer)
        elif isinstance(message, StateRequest):
            self._tell_all(State(self._describe()))
        elif isinstance(message, State):
            self._states[peer] = message.text
        elif isinstance(message, StatsRequest):
            self._tell_all(StatsReply(self.make_stats(message.detail)))
        elif isinstance(message, StatsReply):
            self.stats[peer] = message.data
        elif isinstance(message, Signal) and message.signum in (signal.SIGINT, signal.SIGTERM):
            if peer == 0:  # rank 0 ends the run next
                self._said_goodbye.add(peer)
            threading.Thread(target=self.on_signal, args=(self._faults.name(peer), message.signum), daemon=True).start()
        elif isinstance(message, Failure):
            self._said_goodbye.add(peer)  # a known failure, so the closed connection is not reported
            threading.Thread(target=self._on_failure, args=(message,), daemon=True).start()

    def _on_failure(self, failure: Failure) -> None:
        text = ""  # rank 0 prints it for all ranks
        if self._rank == 0:
            states = self.ask_states() if failure.investigate else []
            text = "\n".join([*states, failure.text])
            self._tell_all(Failure(failure.text))
        self._finish(text, lambda: self._kill(failure.stopped))

    def _on_silent(self, peers: list[int]) -> None:
        if self._rank > 1:
            time.sleep(2 * self._heartbeat.interval + PRECEDENCE_SECONDS)
        names = " and ".join(map(self._faults.name, peers))
        states = "; ".join(self._last_words.get(peer, f"rank {peer}: no heartbeat yet") for peer in peers)
        hosts = self._faults.hosts
        is_cut_off = self._rank == 0 and any(hosts[peer : peer + 1] != hosts[:1] for peer in peers)
        text = (
            f"labinfer: error: no heartbeat from {names} for {self._faults.timeout:g} s (--fault-timeout): the "
            f"process is stopped, or its host or network is down; last state: {states}; aborting all "
            f"ranks{self._faults.end_launcher() if is_cut_off else ''}"
        )

        def end_others() -> None:
            if self._rank == 0:
                self._tell_all(Failure(text, stopped=tuple(peers)))
            self._kill(peers)

        self._finish(text, end_others)

    def _on_closed(self, peer: int) -> None:
        time.sleep(GRACE_SECONDS)  # the failed rank's launcher may report and end all ranks first
        text = f"labinfer: rank {peer} exited without a message (killed, or out of memory?); aborting all ranks"
        if self._rank == 0:
            self._tell_all(Failure(text))
        self._finish(text if self._rank == 0 or peer == 0 else "")

    def _kill(self, peers: Iterable[int]) -> None:
        for peer in peers:
            self._faults.kill(peer)

    def _finish(self, text: str, last: Callable[[], None] = lambda: None) -> None:
        if self._ending.acquire(blocking=False):
            self._end(text, last)
