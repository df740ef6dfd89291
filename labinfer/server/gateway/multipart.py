"""MultipartReader: streaming parser of a multipart form with a file (RFC 7578), in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

MAX_PARTS = 16
"""Maximum number of parts of a form."""


@dataclass(frozen=True)
class PartBegin:
    """Beginning of a part of the form, with the part's name."""

    name: str
    filename: str | None
    """Name of the file; None for a part that is not a file."""


class MultipartReader:
    """Streaming parser of a ``multipart/form-data`` body. Limits the header fields of each part.

    Args:
        content_type: value of the ``Content-Type`` header.

    Raises:
        FormParserError: the header names no boundary.
    """

    def __init__(self, content_type: str):
        kind, parameters = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not parameters.get(b"boundary"):
            raise FormParserError(f"Content-Type must be multipart/form-data with a boundary, not {content_type!r:.80}")
        self._events: list[PartBegin | bytes] = []
        self._num_parts, self._disposition = 0, b""
        self._field, self._value = bytearray(), bytearray()
        self._parser = MultipartParser(
            parameters[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, begin, end: self._field.extend(data[begin:end]),
                "on_header_value": lambda data, begin, end: self._value.extend(data[begin:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": lambda data, begin, end: self._events.append(data[begin:end]),
            },
        )

    @property
    def is_whole(self) -> bool:
        """Whether the multipart body is complete: its closing delimiter has arrived."""
        return self._parser.state == MultipartState.END

    def feed(self, data: bytes) -> list[PartBegin | bytes]:
        """Parse the next piece of the body. Returns the parts that begin in it, each followed by the pieces of its
        content.

        Raises:
            FormParserError: the form is invalid.
        """
        self._parser.write(data)
        events, self._events = self._events, []
        return events

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise FormParserError(f"the form has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _end_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, parameters = parse_options_header(self._disposition)
        if b"name" not in parameters:
            raise FormParserError("a part of the form has no name")
        name, filename = parameters[b"name"], parameters.get(b"filename")
        self._events.append(
            PartBegin(name.decode("utf-8", "replace"), filename and filename.decode("utf-8", "replace"))
        )
