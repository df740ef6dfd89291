"""Endpoint: a path of the API with its handler; declared next to the handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import ModuleType, UnionType
from typing import Any

import msgspec
from starlette.responses import Response

from labinfer.server.gateway.error_form import OPENAI_ERRORS, ErrorForm
from labinfer.server.gateway.event_stream import EventStream
from labinfer.server.gateway.host_check import CHANGES_NOTHING
from labinfer.server.gateway.http_context import JSON, HttpContext
from labinfer.server.gateway.options import ServerOptions

COMMON_ERRORS = (400, 403, 405, 421, 431, 500)
"""Error statuses of every endpoint. An endpoint whose HTTP method changes nothing (GET, HEAD, …) does not have 403."""
BODY_ERRORS = (*COMMON_ERRORS, 404, 413, 415, 429, 503)
"""Error statuses of endpoints that read a request body."""
GENERATION_ERRORS = (*BODY_ERRORS, 408, 499)
STORED_ERRORS = (*COMMON_ERRORS, 404)
MODEL_ERRORS = (*COMMON_ERRORS, 404, 503)
"""Error statuses of endpoints that need a loaded model but read no body."""
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}

Handler = Callable[[HttpContext], Awaitable[Response | EventStream]]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An endpoint: its path, HTTP method and handler, and what ``/openapi.json`` says about the endpoint."""

    method: str
    path: str
    aliases: tuple[str, ...] = ()
    """Other paths that the handler also serves."""
    handler: Handler
    needs_key: bool = True
    opened_by: str = ""
    """Name of the server option that makes the endpoint public."""
    logged: bool = True
    """Whether each request is logged; false for endpoints that programs poll every few seconds."""
    summary: str = ""
    body: type[msgspec.Struct] | None = None
    form: type[msgspec.Struct] | None = None
    """Schema of the request body if it is a multipart form with a file; None for other bodies."""
    answer: type | UnionType | None = None
    """Schema of a successful response; None if the response is always a stream."""
    statuses: tuple[int, ...] = (200,)
    """HTTP statuses of responses with ``answer``; empty if every request is refused."""
    events: tuple[type[msgspec.Struct], ...] = ()
    """Event schemas of a stream, if the endpoint can stream."""
    content_type: str = JSON
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Name and JSON schema of each query parameter."""
    errors: tuple[int, ...] = COMMON_ERRORS
    error_form: ErrorForm = OPENAI_ERRORS
    is_anthropics_too: bool = False
    """Whether Anthropic's API also has this path. If so, Anthropic's clients get Anthropic's format, and ``answer`` is a union of
    OpenAI's and Anthropic's schemas."""

    @property
    def templates(self) -> list[str]:
        """The endpoint's path and aliases in OpenAPI's notation of path parameters: ``{id}``."""
        return [path.replace(":path}", "}") for path in (self.path, *self.aliases)]

    @property
    def error_statuses(self) -> tuple[int, ...]:
        """All error statuses of the endpoint, ascending."""
        return tuple(sorted({*self.errors, *[401] * self.needs_key} - {*[403] * (self.method in CHANGES_NOTHING)}))

    def with_options(self, options: ServerOptions, keys_required: bool) -> Endpoint:
        """Copy of the endpoint for a server with these ``options``: the copy needs an API key only if the server has keys and no
        option makes the endpoint public."""
        is_open = bool(self.opened_by) and getattr(options, self.opened_by)
        return replace(self, needs_key=self.needs_key and keys_required and not is_open)


def endpoint(method: str, path: str, **details: Any) -> Callable[[Handler], Handler]:
    """Register a handler for a path. The first line of its docstring is the endpoint's summary.

    Args:
        details: further fields of the ``Endpoint``.
    """

    def add(handler: Handler) -> Handler:
        summary = handler.__doc__.partition("\n")[0]
        added = Endpoint(method=method, path=path, handler=handler, summary=summary, **details)
        handler.endpoints = (*getattr(handler, "endpoints", ()), added)
        return handler

    return add


def module_endpoints(*modules: ModuleType) -> tuple[Endpoint, ...]:
    """Endpoints of the handlers in ``modules``, in the order of definition."""
    parts = (part for module in modules for part in vars(module).values())
    return tuple(each for part in parts for each in getattr(part, "endpoints", ()))
