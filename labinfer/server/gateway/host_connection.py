"""HostConnection: the gateway's end of the socket to an engine host. HostListener: accepts the connections of engine hosts."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable

import labinfer
from labinfer.base.errors import BrokenConnection
from labinfer.base.heartbeat import BEATS, HeartbeatMonitor
from labinfer.base.plugins import PLUGINS
from labinfer.server.link.frames import FromGateway, FromHost, Heartbeat, RegisterHost, Rejected
from labinfer.server.link.framing import FrameReader, pack

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
REGISTRATION_SECONDS = 10.0
"""Seconds within which an engine host must register on a new connection, as other engine hosts may be waiting."""
PRECEDENCE_SECONDS = 1.0
"""Seconds after the fault timeout before the gateway kills a silent engine host. In this time the other ranks end, and log more
details."""
CREDENTIALS = struct.Struct("3i")
"""Layout of the socket option SO_PEERCRED: process, user and group id of a local socket's peer (``unix(7)``)."""


class HostConnection:
    """A connection to an engine host.

    Args:
        fault_timeout: seconds without a heartbeat after which the host is killed.
        clock: monotonic time in seconds.
    """

    def __init__(self, connection: socket.socket, fault_timeout: float, clock: Callable[[], float] = time.monotonic):
        connection.setblocking(False)
        self._fault_timeout = fault_timeout
        self._heartbeat = HeartbeatMonitor([self], (1 + 2 / BEATS) * fault_timeout + PRECEDENCE_SECONDS, clock)
        self._state = "nothing yet"
        self._socket, self._reader = connection, FrameReader(FromHost)
        self._pending: list[FromHost] = []
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, frame: FromGateway) -> None:
        """Enqueue a frame for ``write``."""
        self._outbox.put_nowait(pack(frame))

    async def write(self) -> None:
        """Send the frames that ``send`` enqueues, until the connection ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # ``receive`` reports the end of the connection
            while True:
                await loop.sock_sendall(self._socket, await self._outbox.get())

    async def receive(self) -> list[FromHost]:
        """Wait for the next frames; returns at least one.

        Raises:
            BrokenConnection: the engine host has ended, or its frames are invalid.
        """
        frames, self._pending = self._pending, []
        while not frames:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._socket, CHUNK_BYTES)
            except OSError as error:
                raise BrokenConnection(f"the engine exited: {error}") from None
            if not data:
                raise BrokenConnection("the engine exited without a message")
            self._heartbeat.hear(self)
            frames = self._reader.feed(data)
        return frames

    @property
    def is_silent(self) -> bool:
        """Whether the last frame of the engine host is older than half of the fault timeout."""
        return self._heartbeat.age(self) > self._fault_timeout / 2

    @property
    def silence(self) -> float:
        """Seconds since the last frame of the engine host; 0 if at most one heartbeat is overdue."""
        age = self._heartbeat.age(self)
        return age if age > 2.5 * self._heartbeat.interval else 0.0

    def note(self, beat: Heartbeat) -> None:
        """Store the state in ``beat``, a heartbeat of the engine host, for error messages."""
        self._state = beat.state

    async def watch(self) -> None:
        """Send heartbeats, and kill the engine host if it sends no frames for too long."""
        while not self._heartbeat.silent():
            self.send(Heartbeat())
            await asyncio.sleep(self._heartbeat.interval)
        pid, _, _ = CREDENTIALS.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        logger.error(
            "error: no heartbeat from rank 0 (process %d) for %g s (--fault-timeout): it is stopped; last state: "
            "%s; killing it",
            pid,
            self._fault_timeout,
            self._state,
        )
        with contextlib.suppress(OSError):
            if pid:  # 0 if the process is in another PID namespace
                os.kill(pid, signal.SIGKILL)
            self._socket.shutdown(socket.SHUT_RDWR)  # makes ``receive`` return

    async def receive_registration(self) -> RegisterHost:
        """Wait for the engine host's first frame.

        Raises:
            BrokenConnection: the host has ended, or the first frame is not ``RegisterHost``.
        """
        first, *self._pending = await self.receive()
        if not isinstance(first, RegisterHost):
            raise BrokenConnection(f"the first frame of a host must be RegisterHost, not {type(first).__name__}")
        return first

    async def reject(self, message: str) -> None:
        """Send the reason ``message`` for a rejection, and close the connection."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self._socket, pack(Rejected(message)))
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class HostListener:
    """Accepts engine hosts one after another: a new host waits until the current one has ended.

    Args:
        listener: a listening local socket; see ``server/link/local_socket.py``.
        token: the secret that an engine host must send.
        model_names: names of the models that an engine host must serve.
        fault_timeout: seconds without a heartbeat after which a host is killed.
    """

    def __init__(self, listener: socket.socket, token: str, model_names: list[str], fault_timeout: float):
        listener.setblocking(False)
        self._fault_timeout = fault_timeout
        self._listener, self._token, self._model_names = listener, token, model_names

    async def accept(self) -> HostConnection:
        """Wait for the next engine host with a valid registration."""
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            link = HostConnection(connection, self._fault_timeout)
            try:
                registration = await asyncio.wait_for(link.receive_registration(), REGISTRATION_SECONDS)
            except (BrokenConnection, asyncio.TimeoutError) as error:
                logger.debug("an engine is rejected: %s", str(error) or "it sends no registration")
                link.close()
                continue
            message = self._rejection_reason(registration)
            if not message:
                return link
            logger.warning("an engine is rejected: %s", message)
            await link.reject(message)

    def _rejection_reason(self, registration: RegisterHost) -> str:
        """Reason to reject an engine host; empty if its registration is valid."""
        if not hmac.compare_digest(registration.token.encode(), self._token.encode()):
            return "its token is not this gateway's"
        if registration.version != labinfer.__version__:
            return f"its version is {registration.version}, but that of the gateway is {labinfer.__version__}"
        if registration.model_names != self._model_names:
            return f"its models are {', '.join(registration.model_names)}, but the gateway serves "
            f"{', '.join(self._model_names)}"
        if registration.plugins != (own := PLUGINS.identities()):
            given, known = (", ".join(names) or "none" for names in (registration.plugins, own))
            return f"its plugins are {given}, but the gateway was started with {known}; restart the server"
        return ""
