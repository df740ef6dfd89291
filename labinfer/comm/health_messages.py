"""Messages of the health channel and their framing: MessagePack with a length prefix."""

from __future__ import annotations

import socket

import msgspec

LENGTH_BYTES = 4
MAX_FRAME = 1 << 20
"""Maximum length of a message in bytes."""
CHUNK_BYTES = 1 << 16


class RegisterRank(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a follower, with the group's secret ``key``."""

    rank: int
    key: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Orderly shutdown: the sender's connection may close."""


class RankHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Heartbeat with the rank's step and wait as a text."""

    state: str


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Failure of a rank. The rank has printed the reason, unless it is one of ``stopped``."""

    text: str
    investigate: bool = False
    """Whether rank 0 collects the states of all ranks before the group ends (after a timeout)."""
    stopped: tuple[int, ...] = ()
    """Ranks without heartbeats, which other ranks on their machines kill."""


class StateRequest(msgspec.Struct, frozen=True, tag="what"):
    """Rank 0 requests a rank's state. The health channel's thread answers, even if the main thread hangs."""


class State(msgspec.Struct, frozen=True, tag="state"):
    """Step and wait of a follower as a text."""

    text: str


class StatsRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Rank 0 requests a rank's stats. The health channel's thread sends them while steps run."""

    detail: int
    """Argument of the rank's ``make_stats``; opaque to the health channel."""


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    """Bytes returned by a follower's ``make_stats``."""

    data: bytes


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """SIGINT or SIGTERM received by a rank, possibly by this rank only."""

    signum: int


_decode = msgspec.msgpack.Decoder(
    RegisterRank | Goodbye | RankHeartbeat | Failure | StateRequest | State | StatsRequest | StatsReply | Signal
).decode
_encode = msgspec.msgpack.Encoder().encode


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message.

    Raises:
        OSError: the connection is broken, or its send timeout passed.
    """
    data = _encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def decode(data: bytes) -> msgspec.Struct | None:
    """Decode a message (without its length prefix); None if invalid."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Inbox:
    """Incremental decoder of a connection's messages, so that a partial message blocks nothing."""

    def __init__(self, connection: socket.socket):
        self._connection, self._data = connection, bytearray()

    def receive(self) -> list | None:
        """Read available bytes and return the complete messages; None if the connection is closed or its data is invalid."""
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
