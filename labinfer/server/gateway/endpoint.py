"""Endpoint: a path of the API with its handler, stated where the handler is defined."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType, UnionType
from typing import Any

import msgspec
from starlette.responses import Response

from labinfer.server.gateway.error_form import OPENAI_ERRORS, ErrorForm
from labinfer.server.gateway.event_stream import EventStream
from labinfer.server.gateway.http_context import JSON, HttpContext

ANYWHERE = (400, 403, 405, 421, 431, 500)
"""Statuses of errors that any endpoint may answer with."""
READING = (*ANYWHERE, 404, 413, 415, 429, 503)
"""Statuses of errors of endpoints that read a body."""
GENERATING = (*READING, 408, 499)
STORED = (*ANYWHERE, 404)
LOOKING = (*ANYWHERE, 404, 503)
"""Statuses of errors of endpoints that look at a model at work."""
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}

Handler = Callable[[HttpContext], Awaitable[Response | EventStream]]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A path, its method, who answers, and how the document describes that."""

    method: str
    path: str
    aliases: tuple[str, ...] = ()
    """Further paths with the same answers, which the document leaves out."""
    handler: Handler
    needs_key: bool = True
    opened_by: str = ""
    """Name of the server's option that leaves the key away."""
    logged: bool = True
    """Whether each request is logged; what is asked every few seconds is not."""
    summary: str = ""
    body: type[msgspec.Struct] | None = None
    form: type[msgspec.Struct] | None = None
    """A body that is a form with a file."""
    answer: type | UnionType | None = None
    """A successful one; None where that is always a stream."""
    events: tuple[type[msgspec.Struct], ...] = ()
    """Kinds of events of a stream, where one may be asked for."""
    content_type: str = JSON
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Name and JSON schema of each parameter."""
    errors: tuple[int, ...] = ANYWHERE
    error_form: ErrorForm = OPENAI_ERRORS
    is_anthropics_too: bool = False
    """Whether Anthropic's API has this path, too: its clients are answered in its form, and ``answer`` is a union."""

    @property
    def template(self) -> str:
        """The path as the document writes it."""
        return self.path.replace(":path}", "}")


def endpoint(method: str, path: str, **details: Any) -> Callable[[Handler], Handler]:
    """Have a handler answer a path. The first line of its docstring is the endpoint's summary.

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
    """The endpoints whose handlers are defined in these modules, in their order."""
    parts = (part for module in modules for part in vars(module).values())
    return tuple(each for part in parts for each in getattr(part, "endpoints", ()))
