"""Routes that need no engine: health, readiness, version and metrics."""

from __future__ import annotations

from typing import Literal

from starlette.responses import Response

import labinfer
from labinfer.gateway.call import Call
from labinfer.gateway.service import LOADING_SECONDS
from labinfer.openai import api_errors
from labinfer.openai.answer import Answer


class Health(Answer):
    """A server that is alive, and what it does: its models are loaded, the engine takes up its work after it has died, or the
    server comes to its end."""

    status: Literal["ok", "loading", "recovering", "draining"]


class Readiness(Answer):
    """A server that takes requests, and its models."""

    status: Literal["ready"]
    models: list[str]


class Version(Answer):
    """Version of the server."""

    version: str


async def health(call: Call) -> Response:
    """``GET /health``: the gateway is alive, and so is the engine behind it, or another one is on its way."""
    engine = call.service.engine
    if engine.is_draining:
        return call.json(Health("draining"))
    if engine.is_recovering:
        return call.json(Health("recovering"))
    return call.json(Health("ok" if call.service.models else "loading"))


async def ready(call: Call) -> Response:
    """``GET /ready``: requests are taken now, long prompts and new forms of answers included."""
    call.service.model(None)
    if call.service.engine.is_recovering:
        raise api_errors.overloaded("the engine has died, and another one takes up its work", LOADING_SECONDS)
    call.service.check_room()
    return call.json(Readiness("ready", call.service.model_names))


async def version(call: Call) -> Response:
    """``GET /version``."""
    return call.json(Version(labinfer.__version__))


async def metrics(call: Call) -> Response:
    """``GET /metrics`` for Prometheus."""
    body, content_type = call.service.metrics.render()
    return Response(body, headers=call.headers | {"content-type": content_type})
