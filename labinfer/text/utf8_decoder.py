"""Utf8Decoder: incremental decoding of UTF-8."""

from __future__ import annotations

import codecs
import re

REPLACEMENT = "\ufffd"
_ESCAPED = re.compile("[\udc80-\udcff]")
"""Pattern of a byte that Python could not decode. Python's ``surrogateescape`` handler represents such a byte as a lone
surrogate."""


class Utf8Decoder:
    """Decodes UTF-8 that arrives in pieces of any length.

    Every well-formed character (Unicode Standard, table 3-7) is decoded. Every other byte becomes one U+FFFD; for example, the
    incomplete sequence E4 BD becomes two of them. The text therefore depends on the bytes alone, not on the pieces. SentencePiece's
    own decoder does the same; Rust and Python (``errors="replace"``) make one U+FFFD of E4 BD.
    """

    def __init__(self):
        self.pending = b""
        """First bytes of a character that is incomplete so far."""

    def decode(self, data: bytes, is_last: bool = False) -> str:
        """Decode ``data``, and return the text that it completes. With ``is_last``, the bytes of an incomplete character become
        U+FFFD."""
        if self.pending:
            data = self.pending + data
        text, num_decoded = codecs.utf_8_decode(data, "surrogateescape", is_last)
        self.pending = data[num_decoded:]
        return text if text.isascii() else _ESCAPED.sub(REPLACEMENT, text)
