"""Utf8Decoder: UTF-8 bytes as text while they come in."""

from __future__ import annotations

import codecs
import re

REPLACEMENT = "\ufffd"
_ESCAPED = re.compile("[\udc80-\udcff]")
"""Bytes that Python's ``surrogateescape`` handler could not decode, each of them as one lone surrogate."""


class Utf8Decoder:
    """Text of bytes, cut anywhere.

    Every well-formed character (Unicode Standard, table 3-7) appears. Each byte that belongs to none is one U+FFFD: the truncated
    sequence E4 BD before another character, or at the end, is two of them. So the text depends on the bytes alone, and not on
    where they are cut. SentencePiece's own decoder has the same rule; Rust's and Python's ``replace`` give one U+FFFD for E4 BD.
    """

    def __init__(self):
        self.pending = b""
        """First bytes of a character whose other bytes have not come."""

    def decode(self, data: bytes, is_last: bool = False) -> str:
        """Text that ``data`` makes certain. With ``is_last`` the pending bytes are decoded, too."""
        if self.pending:
            data = self.pending + data
        text, num_decoded = codecs.utf_8_decode(data, "surrogateescape", is_last)
        self.pending = data[num_decoded:]
        return text if text.isascii() else _ESCAPED.sub(REPLACEMENT, text)
