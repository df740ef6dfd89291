"""HostConnection: the gateway's end of the socket to an engine host, and HostListener, which takes hosts in."""

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
"""Within so long after it has connected, a host has to say who it is: others may wait."""
PRECEDENCE_SECONDS = 1.0
"""The other ranks, which know more, may end a silent host two looks and so much earlier."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group id of a local socket's other end (``unix(7)``, SO_PEERCRED)."""


class HostConnection:
    """A connection to a host.

    Args:
        fault_timeout: seconds without a sign of life, after which the host is ended.
        clock: seconds that never go back.
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
        """Have a frame sent in its turn; see ``write``."""
        self._outbox.put_nowait(pack(frame))

    async def write(self) -> None:
        """Send what there is to send, until the connection ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # whoever reads learns of the other side's end, too
            while True:
                await loop.sock_sendall(self._socket, await self._outbox.get())

    async def receive(self) -> list[FromHost]:
        """The frames that came next, at least one.

        Raises:
            BrokenConnection: the host has ended, or its frames make no sense.
        """
        frames, self._pending = self._pending, []
        while not frames:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._socket, CHUNK_BYTES)
            except OSError as error:
                raise BrokenConnection(f"the engine has ended: {error}") from None
            if not data:
                raise BrokenConnection("the engine has ended without a word")
            self._heartbeat.hear(self)
            frames = self._reader.feed(data)
        return frames

    @property
    def is_silent(self) -> bool:
        """Whether some signs of life are missing."""
        return self._heartbeat.age(self) > self._fault_timeout / 2

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life, 0 as long as at most one is late."""
        age = self._heartbeat.age(self)
        return age if age > 2.5 * self._heartbeat.interval else 0.0

    def note(self, beat: Heartbeat) -> None:
        """Keep what the host said of itself."""
        self._state = beat.state

    async def watch(self) -> None:
        """Give signs of life, and end a host that gives none."""
        while not self._heartbeat.silent():
            self.send(Heartbeat())
            await asyncio.sleep(self._heartbeat.interval)
        pid, _, _ = CREDENTIALS.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        logger.error(
            "error: no sign of life of rank 0 (process %d) for %g s (--fault-timeout): stopped; last heard of %s; it is ended",
            pid,
            self._fault_timeout,
            self._state,
        )
        with contextlib.suppress(OSError):
            if pid:  # else it is not to be seen from here
                os.kill(pid, signal.SIGKILL)
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever reads learns of it

    async def receive_registration(self) -> RegisterHost:
        """The first frame.

        Raises:
            BrokenConnection: it is another one, or none.
        """
        first, *self._pending = await self.receive()
        if not isinstance(first, RegisterHost):
            raise BrokenConnection(f"the first frame of a host must be RegisterHost, not {type(first).__name__}")
        return first

    async def reject(self, message: str) -> None:
        """Say why the host is not taken in, and hang up."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self._socket, pack(Rejected(message)))
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class HostListener:
    """Takes hosts in, one after another: who comes while there is one waits until that is gone.

    Args:
        listener: a local socket that listens; see ``server/link/local_socket.py``.
        token: the secret that a host has to know.
        model_names: the models that a host has to bring.
        fault_timeout: seconds without a sign of life, after which a host is ended.
    """

    def __init__(self, listener: socket.socket, token: str, model_names: list[str], fault_timeout: float):
        listener.setblocking(False)
        self._fault_timeout = fault_timeout
        self._listener, self._token, self._model_names = listener, token, model_names

    async def accept(self) -> HostConnection:
        """The next host that is what it has to be."""
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            link = HostConnection(connection, self._fault_timeout)
            try:
                registration = await asyncio.wait_for(link.receive_registration(), REGISTRATION_SECONDS)
            except (BrokenConnection, asyncio.TimeoutError) as error:
                logger.debug("a host is not taken in: %s", str(error) or "it says nothing")
                link.close()
                continue
            message = self._objection(registration)
            if not message:
                return link
            logger.warning("a host is not taken in: %s", message)
            await link.reject(message)

    def _objection(self, registration: RegisterHost) -> str:
        """The reason not to take a host in, or nothing."""
        if not hmac.compare_digest(registration.token.encode(), self._token.encode()):
            return "it does not know this gateway's token"
        if registration.version != labinfer.__version__:
            return f"it is version {registration.version}, and the gateway is {labinfer.__version__}"
        if registration.model_names != self._model_names:
            return f"it has the models {', '.join(registration.model_names)}, and the gateway serves {', '.join(self._model_names)}"
        if registration.plugins != (own := PLUGINS.identities()):
            given, known = (", ".join(names) or "none" for names in (registration.plugins, own))
            return f"its plugins are {given}, and the gateway was started with {known}; start the server anew"
        return ""
