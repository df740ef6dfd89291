"""Utf8Decoder: incremental decoding of UTF-8."""

from __future__ import annotations

import codecs
import re

REPLACEMENT = "\ufffd"
_ESCAPED = re.compile("[\udc80-\udcff]")
"""Bytes that Python's ``surrogateescape`` handler could not decode, each of them as one lone surrogate."""


class Utf8Decoder:
    """Decodes UTF-8 that arrives in pieces of any length.

    Every well-formed character (Unicode Standard, table 3-7) appears. Every other byte becomes one U+FFFD: the truncated sequence E4 BD
    before another character, or at the end, becomes two. The text therefore depends on the bytes alone, not on the pieces.
    SentencePiece's own decoder has this rule; Rust's and Python's ``replace`` give one U+FFFD for E4 BD.
    """

    def __init__(self):
        self.pending = b""
        """First bytes of an incomplete character."""

    def decode(self, data: bytes, is_last: bool = False) -> str:
        """Text that ``data`` completes. With ``is_last`` the pending bytes are decoded, too."""
        if self.pending:
            data = self.pending + data
        text, num_decoded = codecs.utf_8_decode(data, "surrogateescape", is_last)
        self.pending = data[num_decoded:]
        return text if text.isascii() else _ESCAPED.sub(REPLACEMENT, text)
