"""Messages of the health channel, and how they go over its connections: MessagePack with its length before it."""

from __future__ import annotations

import socket

import msgspec

LENGTH_BYTES = 4
MAX_FRAME = 1 << 20
"""Bytes of a message."""
CHUNK_BYTES = 1 << 16


class RegisterRank(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a follower."""

    rank: int
    key: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """An orderly end; the connection's closing is no failure."""


class RankHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life, with the rank's step and wait in words."""

    state: str


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """A rank failed; it has printed why itself, unless it is one of the ``stopped``."""

    text: str
    investigate: bool = False
    """Ask every rank what it is doing before the group ends (a wait passed its limit)."""
    stopped: tuple[int, ...] = ()
    """Ranks that are silent; whoever shares a machine with one ends it."""


class StateRequest(msgspec.Struct, frozen=True, tag="what"):
    """Rank 0 asks what a rank is doing. The thread of its health channel answers, whatever the main thread is stuck in."""


class State(msgspec.Struct, frozen=True, tag="state"):
    """A follower's step and wait, in words."""

    text: str


class StatsRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Rank 0 asks for a rank's stats, which the thread of its health channel sends beside whatever runs."""

    detail: int
    """Argument of the rank's ``make_stats``; the health channel does not know its meaning."""


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    """Bytes that a follower's ``make_stats`` returned."""

    data: bytes


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """A rank got SIGINT or SIGTERM, perhaps alone."""

    signum: int


_decode = msgspec.msgpack.Decoder(
    RegisterRank | Goodbye | RankHeartbeat | Failure | StateRequest | State | StatsRequest | StatsReply | Signal
).decode
_encode = msgspec.msgpack.Encoder().encode


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message.

    Raises:
        OSError: the connection is broken, or takes nothing within its time limit.
    """
    data = _encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def decode(data: bytes) -> msgspec.Struct | None:
    """A message from the bytes after its length; None where they are none."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Inbox:
    """Messages out of a connection as its bytes come, so that half a message holds nobody up."""

    def __init__(self, connection: socket.socket):
        self._connection, self._data = connection, bytearray()

    def receive(self) -> list | None:
        """Messages that are complete with the bytes that have come; None when the connection is closed or its bytes are none."""
        try:
            piece = self._connection.recv(CHUNK_BYTES)
        except OSError:
            return None
        self._data += piece
        messages: list = []
        while len(self._data) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._data[:LENGTH_BYTES], "little")
            if end > LENGTH_BYTES + MAX_FRAME:
                return None
            if len(self._data) < end:
                break
            message = decode(self._data[LENGTH_BYTES:end])
            if message is None:
                return None
            messages.append(message)
            del self._data[:end]
        return messages if piece else None
