"""ClientConnection: uvicorn's HTTP connection with time and memory limits against clients that are slow or send too much.

Without limits a client can hold a connection and its memory forever: by sending a request one byte at a time or never (CWE-400,
Slowloris), by an endless header, trailer or chunk extension, by excessive pipelining, or by not reading the response. With these
limits, a connection uses less than 0.2 MiB until its request is admitted.
"""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError

REQUEST_SECONDS = 60.0
"""Timeout in seconds for a complete request, from its first byte; for the first request of a connection, from the start of the
connection."""
STALL_SECONDS = 60.0
"""Timeout in seconds for a client that reads nothing while the buffers for the response are full."""
LINGER_SECONDS = 2.0
"""Seconds that a client has to read an error response before the connection closes. An immediate close, with data of
the client still unread, would discard the response."""
UPGRADE_FIELDS = (b"connection", b"upgrade", b"http2-settings")
MAX_HEAD = 1 << 16
"""Maximum bytes of a request outside its body: request line, header fields and chunk framing."""
MAX_FIELDS = 128
"""Maximum number of header fields of a request; each field takes several Python objects."""
CHUNK_OVERHEAD = 8
"""Allowed bytes of chunk framing per body byte, in addition to ``MAX_HEAD``; a one-byte chunk has five bytes of framing."""
MAX_UNREAD = 1 << 26
"""Maximum bytes of a request body that are read and discarded after the response is complete, so that the client can read the
response."""
MAX_AHEAD = 16
"""Maximum number of pipelined requests of a connection."""
READ_BYTES = 1 << 14
"""Maximum bytes per read. asyncio's 256 KiB reads from a thousand unauthenticated connections would block the event loop, and delay
other requests."""


class TooMuch(Exception):
    """An HTTP message has more header fields, or a connection more pipelined requests, than allowed."""


class ClientConnection(HttpToolsProtocol):
    """An HTTP connection that is aborted when a limit is exceeded; the request's handler sees a client disconnect.

    Args:
        max_connections: maximum number of open connections; 0 means unlimited. Above it, the connection that has waited
            longest for a complete request is closed.
        keywords: arguments of uvicorn's protocol class.
    """

    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _num_bytes = _num_body_bytes = 0  # bytes of the current message, and of its body
    _in_head = True
    _awaited_since = math.inf
    """Time from which on the connection has waited for a complete request, in seconds of the event loop's clock."""
    _is_refused = False

    def __init__(self, *, max_connections: int = 0, **keywords: Any):
        super().__init__(**keywords)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        super().connection_made(transport)
        self._start_timer()
        self._awaited_since = self.loop.time()
        if 0 < self._max_connections < len(self.connections):
            oldest = min(self.connections, key=lambda connection: connection._awaited_since)
            oldest.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        while data:
            data = self._feed(data)
        if self._overhead > MAX_HEAD and not self._is_refused:
            self._refuse(api_errors.too_large_head(MAX_HEAD))

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.abort()  # no complete request yet, so shutdown need not wait
        else:
            super().shutdown()

    def _feed(self, data: bytes) -> bytes:
        """Parse ``data``. Returns the part that must be parsed again. A request for a protocol upgrade is parsed again as a plain
        HTTP/1.1 request (RFC 9110, section 7.8): Java's clients begin with such a request, and uvicorn would lose its body."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._is_upgrade:
                head = [
                    b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
                ]
                head += [b"%b: %b" % field for field in self.headers if field[0] not in UPGRADE_FIELDS]
                self.parser = httptools.HttpRequestParser(self)
                return b"\r\n".join([*head, b"", data[stop.args[0] :]])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, TooMuch):
                self._refuse(api_errors.too_many_fields(MAX_FIELDS))
            else:
                self._refuse(api_errors.bad_request("malformed HTTP request"))
        return b""

    @property
    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    @property
    def _overhead(self) -> int:
        """Bytes of the current HTTP message outside its body (head, chunk framing), minus ``CHUNK_OVERHEAD`` per body byte. If this
        exceeds ``MAX_HEAD``, the request is refused."""
        return self._num_bytes - (1 + CHUNK_OVERHEAD) * self._num_body_bytes

    # Parser callbacks.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._start_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a field of a trailer, which no handler reads (RFC 9110, section 6.5.1)
        if len(self.headers) == MAX_FIELDS:
            raise TooMuch
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_upgrade:
            return  # ``_feed`` parses the request again without the upgrade fields
        self._in_head = False
        if len(self.pipeline) >= MAX_AHEAD:
            raise TooMuch
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self.cycle.response_complete and self._num_body_bytes > MAX_UNREAD:
            self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._in_head, self._num_bytes, self._num_body_bytes = True, 0, 0
        if not self.cycle.response_complete:
            self._awaited_since = math.inf
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:
            self.cycle.body.clear()  # drop what the handler has not read
            self._awaited_since = self.loop.time()
        super().on_response_complete()

    # Flow control of the response.

    def pause_writing(self) -> None:
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().resume_writing()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.more_body and not cycle.response_complete
        if self.pipeline or is_answering:  # now the client waits for a response, not the server for a request
            self._start_timer()
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer an incomplete request with an error response, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # a handler that reads the body must not send a second response
            self.cycle.waiting_for_100_continue = False  # nor must it send 100 Continue
            self.cycle.message_event.set()
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._is_refused = True
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
