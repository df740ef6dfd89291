"""Server-sent events (WHATWG HTML, "Server-sent events") in the format of OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_errors import ApiError
from labinfer.requests.openai.api_object import ApiObject

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
"""Seconds without an event after which a comment is sent, so that proxies and clients keep the connection open."""
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(data: ApiObject) -> bytes:
    """Encode ``data`` as a server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


def named_event(data: ApiObject) -> bytes:
    """Encode ``data`` as a server-sent event whose name is the tag of the struct."""
    return f"event: {data.__struct_config__.tag}\n".encode() + event(data)


def error_event(error: ApiError) -> bytes:
    """Encode the server-sent event that reports an error in mid-stream."""
    return b"event: error\n" + event(error.body())


@dataclass(frozen=True)
class StreamForm:
    """Format of an API's streams: end marker, keep-alive message, and encoder of the event that reports an error in mid-stream."""

    end: bytes = DONE
    keep_alive: bytes = KEEP_ALIVE
    error: Callable[[ApiError], bytes] = error_event


OPENAI_FORM = StreamForm()


class EventStream:
    """An ASGI response that sends server-sent events as they arrive, then the end marker.

    Args:
        events: encoded events; an ``ApiError`` raised by the iterator becomes the last event.
        on_disconnect: called if the client disconnects before the end; must make ``events`` end or raise.
        on_end: called when the response ends, for whatever reason.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: dict[str, str],
        on_disconnect: Callable[[], None],
        on_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        form: StreamForm = OPENAI_FORM,
    ):
        self._form = form
        self._events, self._on_disconnect, self._on_end, self._clock = events, on_disconnect, on_end, clock
        fields = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        } | headers
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        side_tasks = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._last_sent = self._clock()
            side_tasks = [
                asyncio.create_task(self._watch(receive)),
                asyncio.create_task(self._keep_alive(send)),
            ]
            try:
                async for data in self._events:
                    await self._send(send, data)
            except ApiError as error:
                await self._send(send, self._form.error(error))
            except Exception:  # noqa: BLE001 - an error event tells the client that the stream is incomplete
                logger.error("a stream failed\n%s", traceback.format_exc().rstrip())
                await self._send(send, self._form.error(api_errors.internal()))
            await self._send(send, self._form.end)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in side_tasks:
                task.cancel()
            with contextlib.suppress(RuntimeError):  # after a cancellation, ``aclose`` fails while the iterator runs
                await self._events.aclose()
            self._on_end()

    async def _send(self, send: Send, data: bytes) -> None:
        self._last_sent = self._clock()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            pause = self._last_sent + KEEP_ALIVE_SECONDS - self._clock()
            if pause <= 0:
                await self._send(send, self._form.keep_alive)
            else:
                await asyncio.sleep(pause)
