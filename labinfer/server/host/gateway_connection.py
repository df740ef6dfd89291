"""GatewayConnection: the engine host's end of the socket to the gateway."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable

from labinfer.base.errors import BrokenConnection
from labinfer.base.heartbeat import HeartbeatMonitor
from labinfer.server.link.frames import FromGateway, FromHost, Heartbeat
from labinfer.server.link.framing import FrameReader, pack

CHUNK_BYTES = 1 << 18
MAX_CHUNKS = 16
"""Maximum number of socket reads in one ``receive``, so that frames do not delay the next step."""
UNREAD_BYTES = 1 << 10
"""Number of bytes in the socket that show that a silent gateway is alive: while this process loads models it does not read, so the
gateway may be blocked by a full socket."""


class GatewayConnection:
    """A connection to the gateway over a local socket; see ``server/link/local_socket.py``."""

    def __init__(self, connection: socket.socket):
        self._socket, self._reader = connection, FrameReader(FromGateway)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._sending = threading.Lock()
        self._num_read = 0

    def send(self, frame: FromHost) -> None:
        """Send a frame; returns when all of it is in the socket.

        Raises:
            BrokenConnection: the gateway is gone.
        """
        try:
            with self._sending:
                self._socket.sendall(pack(frame))
        except OSError as error:
            raise BrokenConnection(f"cannot send to the gateway process: {error}") from None

    def receive(self, seconds: float) -> list[FromGateway]:
        """Return the frames that have arrived; wait up to ``seconds`` for the first one.

        Raises:
            BrokenConnection: the gateway is gone.
        """
        frames: list[FromGateway] = []
        for _ in range(MAX_CHUNKS):
            if not self._poll.poll(1e3 * seconds):
                break
            try:
                data = self._socket.recv(CHUNK_BYTES)
            except OSError as error:
                if frames:
                    break  # the next call raises the error, after these frames
                raise BrokenConnection(f"the gateway process is gone: {error}") from None
            if not data and frames:
                break
            if not data:
                raise BrokenConnection("the gateway process has exited")
            self._num_read += len(data)
            frames += self._reader.feed(data)
            seconds = 0.0
        return frames

    def watch(self, timeout: float, make_heartbeat: Callable[[], Heartbeat], on_silence: Callable[[], None]) -> None:
        """Exchange heartbeats with the gateway in a thread, as the main thread may be busy with a long step or with loading.

        Args:
            timeout: seconds without a frame of the gateway after which ``on_silence`` is called.
            make_heartbeat: returns a heartbeat that says which step this rank runs, and for which ranks it waits.
        """
        threading.Thread(
            target=self._watch, args=(timeout, make_heartbeat, on_silence), name="gateway", daemon=True
        ).start()

    def _watch(self, timeout: float, make_heartbeat: Callable[[], Heartbeat], on_silence: Callable[[], None]) -> None:
        heartbeat, num_come = HeartbeatMonitor([self], timeout), 0
        while True:
            time.sleep(heartbeat.interval)
            try:
                self._beat(make_heartbeat())
                # Unread data shows that the gateway lives: the main thread reads it later.
                unread = fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4))
            except (OSError, ValueError):
                return  # the socket is closed, as the main thread will report
            (num_unread,) = struct.unpack("i", unread)
            has_come = num_come != (num_come := self._num_read + num_unread)
            if has_come or num_unread >= UNREAD_BYTES:
                heartbeat.hear(self)
            if heartbeat.silent():
                on_silence()
                return

    def _beat(self, beat: Heartbeat) -> None:
        """Send a heartbeat, unless another frame is being sent, which also shows that this process is alive."""
        if self._sending.acquire(blocking=False):
            try:
                self._socket.send(pack(beat), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass  # the socket is full; a small frame is sent whole or not at all (``unix(7)``)
            finally:
                self._sending.release()
