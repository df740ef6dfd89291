"""body_decoder: streaming decompression of request bodies (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from labinfer.requests.openai import api_errors

GZIP = 31
"""Window bits that select the gzip format in zlib."""
GZIP_NAMES = ("gzip", "x-gzip")


def body_decoder(encoding: str) -> Callable[[bytes, int], bytes]:
    """Return a decoder of request bodies. The decoder takes the next piece of a body and the maximum length of the result in bytes,
    and returns the decoded piece. An empty piece marks the end of the body.

    Args:
        encoding: value of the ``Content-Encoding`` header.

    Raises:
        ApiError: the encoding is not supported. The returned function raises it for invalid or truncated data.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda piece, _: piece
    if name not in GZIP_NAMES:
        raise api_errors.unsupported_encoding(encoding)
    packed = zlib.decompressobj(GZIP)

    def unpack(piece: bytes, most: int) -> bytes:
        if not piece:
            if not packed.eof:
                raise api_errors.bad_request("the body ends before its gzip data does")
            return b""
        if packed.eof:
            raise api_errors.bad_request("the body has more than one gzip member; send one")
        try:
            data = packed.decompress(piece, most)
        except zlib.error as error:
            raise api_errors.bad_request(f"the body is not valid gzip: {error}") from None
        if packed.unused_data:
            raise api_errors.bad_request("the body has more than one gzip member; send one")
        return data

    return unpack
