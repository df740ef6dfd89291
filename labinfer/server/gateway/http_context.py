"""HttpContext: one HTTP request, from the arrival of its header to the end of its response."""

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
"""Metrics label of requests whose path has no endpoint."""
MAX_WARNING = 1000
"""Maximum length of the ``x-warning`` header, in characters."""
JSON = "application/json"
GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Result = TypeVar("Result")
_encode = msgspec.json.Encoder().encode


class HttpContext:
    """An HTTP request and what its response needs, as its handler uses them.

    Args:
        route: path pattern of the request's endpoint; empty without one.
        error_form: format of error responses to the request.
        parameters: names of the query parameters of the request's endpoint.
    """

    def __init__(
        self,
        service: Service,
        http: Request,
        route: str,
        error_form: ErrorForm = OPENAI_ERRORS,
        parameters: frozenset[str] = frozenset(),
    ):
        self.service, self.http, self.route, self.error_form = service, http, route, error_form
        self._parameters = parameters
        given = http.headers.get(ID_HEADER, "")
        self.id = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        self.caller: ApiCaller = ANONYMOUS
        self.priority = 0
        """Number that is added to the priority value of every engine request of this HTTP request."""
        self.seconds = service.options.request_timeout
        """Timeout, in seconds, of the engine requests of this HTTP request; 0 for none."""
        self.begin = service.clock()
        self.log_fields: dict[str, Any] = {}
        """Fields of the request's log line; see ``FinishedRequest``."""
        self._body_lease: BodyLease | None = None
        self._warnings: list[str] = []
        self._ended = False

    @property
    def queue_name(self) -> str:
        """Name of the queue in which this request's costly work waits (``WorkQueue``): the caller's name, and on a server without
        keys also the client's address."""
        if self.caller != ANONYMOUS or self.http.client is None:
            return self.caller.name
        return f"{self.caller.name}@{self.http.client.host}"

    @property
    def num_body_bytes(self) -> int:
        """Number of bytes of the body that have been read so far."""
        return self._body_lease.num_bytes if self._body_lease else 0

    async def body(self) -> bytearray:
        """Read and decompress the whole body. The body counts against the body memory until ``free_body`` or the end of the
        request.

        Raises:
            ApiError: 400, 413 or 415 if the body is broken, too long or not gzip; 429 or 503 if the body memory is used up.
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

    def charge_body_memory(self, num_bytes: int) -> None:
        """Reserve ``num_bytes`` more in the body memory, for stored responses that this request continues.

        Raises:
            ApiError: the body memory is used up.
        """
        self._body_lease.grow(num_bytes)

    def free_body(self) -> None:
        """Release the share of this request in the body memory. The caller must have dropped the body."""
        if self._body_lease is not None:
            self._body_lease.close()

    async def read(self, kind: type[Result]) -> Result:
        """Read the request body and decode it as ``kind``.

        Raises:
            ApiError: the body is too long, not JSON, or has a field that is unknown or out of bounds.
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
            self.warn(f"unknown fields were ignored: {', '.join(ignored)}")
        return body

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, which processes the body, and return its result. For a long body it runs in a thread, so that other
        requests do not wait. Only one thread does such work, as the GIL would serialize several threads."""
        if self.num_body_bytes <= SMALL_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.service.body_thread, work)

    def query(self) -> dict[str, str]:
        """The query parameters of the request, checked to be declared by the endpoint.

        Raises:
            ApiError: a parameter is unknown or a duplicate.
        """
        given = self.http.query_params.multi_items()
        for number, (name, _) in enumerate(given):
            if name not in self._parameters:
                known = " and ".join(sorted(self._parameters))
                raise api_errors.bad_request(f"unknown parameter {name!r:.60}; allowed: {known}")
            if name in dict(given[:number]):
                raise api_errors.bad_request(f"{name} is given twice", name)
        return dict(given)

    def known_query(self) -> dict[str, str]:
        """The query parameters that the endpoint has declared; all other parameters are ignored. Of duplicates, the last one
        counts."""
        return {name: value for name, value in self.http.query_params.items() if name in self._parameters}

    def answer_fields(self, prefix: str, model: str) -> dict[str, Any]:
        """Fields of every response object: id (with ``prefix``), creation time and model."""
        return {"id": prefix + self.id, "created": int(self.service.wall_clock()), "model": model}

    def json(
        self, content: ApiObject | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
    ) -> Response:
        """Return a JSON response with ``content``."""
        return Response(_encode(content), status, self.headers | (headers or {}), JSON)

    def warn(self, text: str) -> None:
        """Add a warning to the ``x-warning`` header of the response."""
        self._warnings.append(text)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that every response to this request gets."""
        headers = {ID_HEADER: self.id}
        if self._warnings:
            text = "; ".join(self._warnings)[:MAX_WARNING].encode("ascii", "backslashreplace").decode()
            headers[WARNING_HEADER] = "".join(letter if letter.isprintable() else " " for letter in text)[:MAX_WARNING]
        return headers

    async def until_disconnect(self, work: Awaitable[Result], on_disconnect: Callable[[], None]) -> Result:
        """Await ``work`` and return its result. If the client disconnects first, calls ``on_disconnect``, which must make ``work``
        end. The body must have been read before."""

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
        """Record the metrics of the request, and write its log line if ``log``. Idempotent."""
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
