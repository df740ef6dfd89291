"""MultipartReader: a form with a file (RFC 7578) while it comes in, in memory that does not grow with the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_string

MAX_PART_HEAD = 1 << 13
"""Bytes of the fields of a part."""
MAX_PREAMBLE = 1 << 10
"""Bytes before the first part."""
BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
DELIMITER_END = 2
"""Bytes behind a delimiter: the end of the line, or two dashes."""


MAX_PARTS = 16
"""Parts of a form."""


class BadForm(ValueError):
    """The form is not as it must be."""


@dataclass(frozen=True)
class PartBegin:
    """A part begins."""

    name: str
    filename: str | None
    """None for a part that is no file."""


@dataclass(frozen=True)
class PartData:
    """A piece of the part's content."""

    data: bytes


@dataclass(frozen=True)
class PartEnd:
    """The part is whole."""


Event = PartBegin | PartData | PartEnd


class MultipartReader:
    """Parts of a body of the type ``multipart/form-data``.

    Args:
        content_type: the header of this name.

    Raises:
        BadForm: it names no boundary.
    """

    def __init__(self, content_type: str):
        match = BOUNDARY.search(content_type)
        if not content_type.lower().startswith("multipart/form-data") or match is None:
            raise BadForm(f"Content-Type must be multipart/form-data with a boundary, not {content_type!r:.80}")
        self._delimiter = b"\r\n--" + (match[1] or match[2]).encode("latin-1", "replace")
        self._buffer = bytearray(b"\r\n")  # the first delimiter has no line before it
        self._read = self._preamble
        self._num_parts = 0
        self.is_whole = False
        """Whether the last delimiter has come."""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Take a piece of the body. Yields what it makes certain.

        Raises:
            BadForm: the form is broken.
        """
        if self.is_whole:
            return  # what follows says nothing
        self._buffer += data
        while not self.is_whole:
            events = self._read()
            if events is None:
                return
            yield from events

    # Each reads one thing at the begin of the buffer; None where it takes more bytes to go on.

    def _preamble(self) -> list[Event] | None:
        begin = self._buffer.find(self._delimiter)
        if begin < 0:
            if len(self._buffer) > MAX_PREAMBLE:
                raise BadForm("the form does not begin with its boundary")
            return None
        del self._buffer[: begin + len(self._delimiter)]
        self._read = self._after_delimiter
        return []

    def _after_delimiter(self) -> list[Event] | None:
        if len(self._buffer) < DELIMITER_END:
            return None
        end = bytes(self._buffer[:DELIMITER_END])
        del self._buffer[:DELIMITER_END]
        if end == b"--":
            self.is_whole = True
        elif end != b"\r\n":
            raise BadForm("the form has something behind a boundary")
        self._read = self._head
        return []

    def _head(self) -> list[Event] | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_PART_HEAD:
                raise BadForm(f"the fields of a part of the form have more than {MAX_PART_HEAD} bytes")
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadForm(f"the form has more than {MAX_PARTS} parts")
        head = message_from_string(self._buffer[:end].decode("utf-8", "replace"))
        del self._buffer[: end + 4]
        name = head.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise BadForm("a part of the form has no name")
        filename = head.get_filename()
        if filename is not None:  # its own encoding may be one that leaves half characters, which no answer could hold
            filename = filename.encode("utf-8", "replace").decode()
        self._read = self._content
        return [PartBegin(name, filename)]

    def _content(self) -> list[Event] | None:
        begin = self._buffer.find(self._delimiter)
        if begin >= 0:
            data = bytes(self._buffer[:begin])
            del self._buffer[: begin + len(self._delimiter)]
            self._read = self._after_delimiter
            return [PartData(data), PartEnd()]
        settled = len(self._buffer) - len(self._delimiter) + 1  # the rest may be the begin of a delimiter
        if settled <= 0:
            return None
        data = bytes(self._buffer[:settled])
        del self._buffer[:settled]
        return [PartData(data)]
