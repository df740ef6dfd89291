"""Routes that need no engine: health, readiness, version and metrics."""

from __future__ import annotations

from typing import Literal

from starlette.responses import Response

import labinfer
from labinfer.gateway.call import Call
from labinfer.openai.answer import Answer


class Health(Answer):
    """A server that is alive."""

    status: Literal["ok"]


class Readiness(Answer):
    """A server that takes requests, and its models."""

    status: Literal["ready"]
    models: list[str]


class Version(Answer):
    """Version of the server."""

    version: str


async def health(call: Call) -> Response:
    """``GET /health``: the gateway is alive, and so is the engine behind it, or it is still loading."""
    return call.json(Health("ok"))


async def ready(call: Call) -> Response:
    """``GET /ready``: requests are taken now, long prompts and new forms of answers included."""
    call.service.model(None)
    call.service.check_room()
    return call.json(Readiness("ready", call.service.model_names))


async def version(call: Call) -> Response:
    """``GET /version``."""
    return call.json(Version(labinfer.__version__))


async def metrics(call: Call) -> Response:
    """``GET /metrics`` for Prometheus."""
    body, content_type = call.service.metrics.render()
    return Response(body, headers=call.headers | {"content-type": content_type})
