"""ClientConnection: uvicorn's connection, with bounds of time and memory for clients that are slow or greedy, on purpose or
by accident.

Without them a client may hold a connection and its memory for ever: by sending its request a byte at a time or never
(CWE-400, known as Slowloris), by a head, trailers or extensions of chunks without end, by requests sent ahead, or by not
reading what it is sent. With them a connection whose request has not been let in has less than 0.2 MiB here.
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
"""A request has to be here whole so long after its first byte, and the first one so long after the connection."""
STALL_SECONDS = 60.0
"""A client that reads nothing for so long, with more to read than the system and we keep for it, is given up."""
LINGER_SECONDS = 2.0
"""For a client to read why it was refused: to close at once, with data of its own unread, would take that from it."""
UPGRADE_FIELDS = (b"connection", b"upgrade", b"http2-settings")
MAX_HEAD = 1 << 16
"""Bytes of a request that are not its body: start line, fields, and what chunks have around them."""
MAX_FIELDS = 128
"""Lines of a head; each is several objects."""
CHUNK_OVERHEAD = 8
"""Bytes around the chunks of a body, for each byte in them, beyond ``MAX_HEAD``: those of one byte have five."""
MAX_UNREAD = 1 << 26
"""Bytes of a body that are passed over when its request has been answered, so that the client comes to read the answer."""
MAX_AHEAD = 16
"""Requests that may be sent before the answer to the first."""
READ_BYTES = 1 << 14
"""Bytes that are read from a connection at once. Of asyncio's 256 KiB a thousand strangers' take long to look at, one after another,
and whoever asks meanwhile waits."""


class TooMuch(Exception):
    """A message has more parts than may be."""


class ClientConnection(HttpToolsProtocol):
    """Ends itself when a bound is passed; for whoever answers it, the client has gone then.

    Args:
        max_connections: of the server; 0 for any number. Beyond them, the one whose request has been awaited longest ends.
        keywords: uvicorn's.
    """

    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _num_bytes = _num_body_bytes = 0  # of the message that comes now
    _in_head = True
    _awaited_since = math.inf
    """Time since which a request of this connection is awaited, whole or not begun."""
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
            self.transport.abort()  # half a request: nothing is lost, and nobody is to wait for the rest
        else:
            super().shutdown()

    def _feed(self, data: bytes) -> bytes:
        """Returns what is still to be fed. A request to speak another protocol is taken for one in this protocol (RFC 9110,
        section 7.8), as Java's clients send it first of all; uvicorn alone would lose its body.
        """
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
                self._refuse(api_errors.bad_request("this is no HTTP request that can be understood"))
        return b""

    @property
    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    @property
    def _overhead(self) -> int:
        """Bytes of the present message that are too many if they are more than ``MAX_HEAD``."""
        return self._num_bytes - (1 + CHUNK_OVERHEAD) * self._num_body_bytes

    # What uvicorn's parser has come to.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._start_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which nothing here reads (RFC 9110, section 6.5.1)
        if len(self.headers) == MAX_FIELDS:
            raise TooMuch
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_upgrade:
            return  # it comes again without
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
            self.cycle.body.clear()  # what its handler did not read
            self._awaited_since = self.loop.time()
        super().on_response_complete()

    # What the system has room for.

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
        if self.pipeline or is_answering:  # what has come of the next request has to wait for its turn
            self._start_timer()
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer without having understood the request, and hang up."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # whoever reads its body is not to answer, too
            self.cycle.waiting_for_100_continue = False  # nor to ask for it
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
