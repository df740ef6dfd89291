"""Wire format of msgspec structs in uint8 tensors: a length, then the message. Lengths are checked before use.

A message is sent in one buffer of ``CHUNK`` bytes; the rest of a longer one follows in a second buffer. So a receiver always knows
the size of the buffer to post, and a small message costs one transfer on every transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

CHUNK = 4096
"""Size of the first buffer in bytes, including the length."""
LENGTH_BYTES = 4
MAX_MESSAGE = 256 * 1024 * 1024
"""Maximum length of a message in bytes."""

_encode = msgspec.msgpack.Encoder().encode


class WireError(RuntimeError):
    """Received bytes are no valid message: ranks run different versions, or are out of sync."""


def pack(message: msgspec.Struct) -> list[torch.Tensor]:
    """Encode a message as one or two uint8 tensors, to be sent in order.

    Raises:
        WireError: the message is longer than ``MAX_MESSAGE``.
    """
    data = _encode(message)
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE}")
    first = bytearray(CHUNK)
    first[:LENGTH_BYTES] = len(data).to_bytes(LENGTH_BYTES, "little")
    head = data[: CHUNK - LENGTH_BYTES]
    first[LENGTH_BYTES : LENGTH_BYTES + len(head)] = head
    parts = [torch.frombuffer(first, dtype=torch.uint8)]
    if len(data) > len(head):
        parts.append(torch.frombuffer(bytearray(data[len(head) :]), dtype=torch.uint8))
    return parts


def rest_size(first: torch.Tensor) -> int:
    """Bytes that follow the first chunk.

    Raises:
        WireError: the chunk contains an invalid length.
    """
    length = int.from_bytes(first[:LENGTH_BYTES].numpy().tobytes(), "little")
    if not 0 < length <= MAX_MESSAGE:
        raise WireError(f"a message claims {length} bytes")
    return max(0, length - (CHUNK - LENGTH_BYTES))


def unpack(parts: Sequence[torch.Tensor], decoder: msgspec.msgpack.Decoder):
    """Decode a message from its one or two parts.

    Raises:
        WireError: the bytes do not decode as the decoder's type.
    """
    length = int.from_bytes(parts[0][:LENGTH_BYTES].numpy().tobytes(), "little")
    pieces = [parts[0][LENGTH_BYTES : LENGTH_BYTES + length], *parts[1:]]
    try:
        return decoder.decode(b"".join(piece.numpy().tobytes() for piece in pieces))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a message of {length} bytes does not decode: {error}") from None
