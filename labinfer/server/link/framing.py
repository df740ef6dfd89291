"""Framing on a local socket: MessagePack with a length prefix.

Both sides check the length of a frame before they allocate memory. Nothing is pickled.
"""

from __future__ import annotations

import msgspec

from labinfer.base.errors import BrokenConnection
from labinfer.server.link.frames import FromGateway, FromHost

LENGTH_BYTES = 4
MAX_FRAME = 1 << 28
"""Maximum frame size in bytes."""

_encode = msgspec.msgpack.Encoder().encode


def pack(frame: FromGateway | FromHost) -> bytes:
    """Encode a frame with its length prefix."""
    data = _encode(frame)
    if len(data) > MAX_FRAME:
        raise BrokenConnection(f"a frame of {len(data)} bytes exceeds the limit of {MAX_FRAME}")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


class FrameReader:
    """Incremental decoder of frames from a byte stream.

    Args:
        kind: ``FromGateway`` or ``FromHost``.
    """

    def __init__(self, kind: object):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._data = bytearray()

    def feed(self, data: bytes) -> list:
        """Append ``data``, and return the frames that are now complete.

        Raises:
            BrokenConnection: the data is not valid.
        """
        self._data += data
        frames, begin = [], 0
        while len(self._data) - begin >= LENGTH_BYTES:
            length = int.from_bytes(self._data[begin : begin + LENGTH_BYTES], "little")
            if length > MAX_FRAME:
                raise BrokenConnection(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME}")
            end = begin + LENGTH_BYTES + length
            if len(self._data) < end:
                break
            try:
                frames.append(self._decoder.decode(memoryview(self._data)[begin + LENGTH_BYTES : end]))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise BrokenConnection(f"a frame does not decode: {error}") from None
            begin = end
        del self._data[:begin]
        return frames
