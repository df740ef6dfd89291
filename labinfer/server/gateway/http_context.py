"""HttpContext: one HTTP request, from its head to the end of its answer."""

from __future__ import annotations

import asyncio
import codecs
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from labinfer.requests.json_decode import SMALL_BYTES, WrongBody, decode_json
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_object import ApiObject
from labinfer.server.gateway.access import ANONYMOUS, ApiCaller
from labinfer.server.gateway.body_memory import BodyLease
from labinfer.server.gateway.error_form import OPENAI_ERRORS, ErrorForm
from labinfer.server.gateway.options import MIB
from labinfer.server.gateway.packed_body import body_decoder
from labinfer.server.gateway.request_log import MAX_TEXT, FinishedRequest
from labinfer.server.gateway.service import Service

ID_HEADER = "x-request-id"
WARNING_HEADER = "x-warning"
NO_ROUTE = "none"
"""Stands in metrics for all paths at which nothing is served."""
MAX_WARNING = 1000
"""Characters of that header."""
JSON = "application/json"
GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Result = TypeVar("Result")
_encode = msgspec.json.Encoder().encode


class HttpContext:
    """An HTTP request as handlers work with it.

    Args:
        route: the pattern of its path; empty where nothing is served at it.
        error_form: how its errors are told.
    """

    def __init__(self, service: Service, http: Request, route: str, error_form: ErrorForm = OPENAI_ERRORS):
        self.service, self.http, self.route, self.error_form = service, http, route, error_form
        given = http.headers.get(ID_HEADER, "")
        self.id = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        self.caller: ApiCaller = ANONYMOUS
        self.priority = 0
        """Added to that of its requests."""
        self.seconds = service.options.request_timeout
        """Longest time for them; 0 for any."""
        self.begin = service.clock()
        self.log_fields: dict[str, Any] = {}
        """Fields for the log; see ``FinishedRequest``."""
        self._body_lease: BodyLease | None = None
        self._warnings: list[str] = []
        self._ended = False

    @property
    def queue_name(self) -> str:
        """Name under which costly work of this request waits its turn; without keys, by the client's address."""
        if self.caller != ANONYMOUS or self.http.client is None:
            return self.caller.name
        return f"{self.caller.name}@{self.http.client.host}"

    @property
    def num_body_bytes(self) -> int:
        """Length of the body that was read."""
        return self._body_lease.num_bytes if self._body_lease else 0

    async def body(self) -> bytearray:
        """The whole body, unpacked. It counts as memory in use until ``free_body``, or the end of the request.

        Raises:
            ApiError: 400, 413 or 415 if the body is broken, too long or not gzip; 429 or 503 if too many long bodies are in memory.
        """
        limit = self.service.options.max_body_size * MIB
        announced = self.http.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise api_errors.too_large(limit)
        data, self._body_lease = bytearray(), self.service.body_memory.lease(self.queue_name)
        unpack = body_decoder(self.http.headers.get("content-encoding", ""))
        async for piece in self.http.stream():
            piece = unpack(piece, limit + 1 - len(data))
            if len(data) + len(piece) > limit:
                raise api_errors.too_large(limit)
            self._body_lease.grow(len(piece))
            data += piece
        if data.startswith(codecs.BOM_UTF8):
            del data[: len(codecs.BOM_UTF8)]
        return data

    def count_bytes(self, num_bytes: int) -> None:
        """Count what is read of elsewhere for this request as more of its body, which has been read.

        Raises:
            ApiError: too many long ones are in memory.
        """
        self._body_lease.grow(num_bytes)

    def free_body(self) -> None:
        """Say that nothing long of the body is in memory any more."""
        if self._body_lease is not None:
            self._body_lease.close()

    async def read(self, kind: type[Result]) -> Result:
        """The body as this struct.

        Raises:
            ApiError: it is too long, no JSON, or has a field that is unknown or out of bounds.
        """
        content_type = self.http.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != JSON:
            raise api_errors.unsupported_media_type(content_type)
        data = await self.body()
        ignored: list[str] | None = [] if self.service.options.ignore_unknown_fields else None

        def decode() -> Result:
            try:
                return decode_json(data, kind, ignored)
            except WrongBody as error:
                raise api_errors.bad_request(str(error), error.field) from None

        body = await self.compute(decode)
        if ignored:
            self.warn(f"unknown fields were left out: {', '.join(ignored)}")
        return body

    async def compute(self, work: Callable[[], Result]) -> Result:
        """The result of ``work`` on the body. A long body is worked on in a thread, so that other requests do not wait; one at
        a time, as threads would only take turns.
        """
        if self.num_body_bytes <= SMALL_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.service.body_thread, work)

    def query(self, *names: str) -> dict[str, str]:
        """The parameters that follow the path, by these names.

        Raises:
            ApiError: it has a name that means nothing, or one twice.
        """
        given = self.http.query_params.multi_items()
        for number, (name, _) in enumerate(given):
            if name not in names:
                raise api_errors.bad_request(f"unknown parameter {name!r:.60}; there is {' and '.join(names)}")
            if name in dict(given[:number]):
                raise api_errors.bad_request(f"{name} is given twice", name)
        return dict(given)

    def answer_fields(self, prefix: str, model: str) -> dict[str, Any]:
        """Id, time and model of an answer."""
        return {"id": prefix + self.id, "created": int(self.service.wall_clock()), "model": model}

    def json(
        self, content: ApiObject | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
    ) -> Response:
        """A response with this body."""
        return Response(_encode(content), status, self.headers | (headers or {}), JSON)

    def warn(self, text: str) -> None:
        """Say something to the caller that is no error, in a header of the answer."""
        self._warnings.append(text)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer."""
        headers = {ID_HEADER: self.id}
        if self._warnings:
            text = "; ".join(self._warnings)[:MAX_WARNING].encode("ascii", "backslashreplace").decode()
            headers[WARNING_HEADER] = "".join(letter if letter.isprintable() else " " for letter in text)[:MAX_WARNING]
        return headers

    async def until_disconnect(self, work: Awaitable[Result], on_disconnect: Callable[[], None]) -> Result:
        """Await ``work``; if the client goes meanwhile, ``on_disconnect`` is to make it end. The body has been read."""

        async def watch() -> None:
            try:
                while (await self.http.receive())["type"] != "http.disconnect":
                    pass
            except ClientDisconnect:
                pass
            on_disconnect()

        watching = asyncio.create_task(watch())
        try:
            return await work
        finally:
            watching.cancel()

    def end(self, status: int, log: bool = True) -> None:
        """Count and log the request. Only the first call does anything."""
        if self._ended:
            return
        self._ended = True
        self.free_body()
        seconds = self.service.clock() - self.begin
        self.service.metrics.http(self.route or NO_ROUTE, status, seconds)
        if log:
            finished = FinishedRequest(
                id=self.id,
                caller=self.caller.name,
                route=self.route or self.service.keys.mask(self.http.scope["path"], MAX_TEXT),
                status=status,
                total_seconds=seconds,
                **self.log_fields,
            )
            self.service.log.write(finished)
