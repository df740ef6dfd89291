"""Routes that need no engine: health, readiness, version and metrics."""

from __future__ import annotations

from typing import Literal

from starlette.responses import Response

import labinfer
from labinfer.gateway.call import Call
from labinfer.gateway.service import LOADING_SECONDS, Service
from labinfer.openai import api_errors
from labinfer.openai.answer import Answer, Count

State = Literal["ok", "idle", "loading", "stalled", "recovering", "draining"]


class Health(Answer):
    """State of a server: it runs requests (ok) or has none (idle); its models are loaded; its engine gives no signs of life, or
    ends no step (stalled); another engine takes up the work of one that died; or the server comes to its end."""

    status: State


class Readiness(Answer):
    """A server that takes requests, and its models."""

    status: Literal["ready"]
    models: list[str]


class Version(Answer):
    """Version of the server."""

    version: str


class Pong(Answer):
    """A server that is alive."""


class ServerLoad(Answer):
    """Requests that are answered or await their turn."""

    server_load: Count


async def health(call: Call) -> Response:
    """``GET /health``: the gateway is alive, and so is the engine behind it, or another one is on its way; 503 of one that is
    stalled."""
    state = _state(call.service)
    return call.json(Health(state), 503 if state == "stalled" else 200)


def _state(service: Service) -> State:
    engine = service.engine
    if engine.is_stalled:
        return "stalled"
    if engine.is_draining:
        return "draining"
    if engine.is_recovering:
        return "recovering"
    if not service.models:
        return "loading"
    return "ok" if engine.has_work else "idle"


async def ready(call: Call) -> Response:
    """``GET /ready``: requests are taken now, long prompts and new forms of answers included."""
    call.service.model(None)
    if call.service.engine.is_silent:
        raise api_errors.overloaded("the engine gives no signs of life", LOADING_SECONDS)
    if call.service.engine.is_recovering:
        raise api_errors.overloaded("the engine has died, and another one takes up its work", LOADING_SECONDS)
    call.service.check_room()
    return call.json(Readiness("ready", call.service.model_names))


async def version(call: Call) -> Response:
    """``GET /version``."""
    return call.json(Version(labinfer.__version__))


async def ping(call: Call) -> Response:
    """``GET`` and ``POST /ping``: as ``/health``, for SageMaker."""
    return call.json(Pong(), 503 if _state(call.service) == "stalled" else 200)


async def load(call: Call) -> Response:
    """``GET /load``, as vLLM's."""
    return call.json(ServerLoad(call.service.limits.num_open))


async def metrics(call: Call) -> Response:
    """``GET /metrics`` for Prometheus."""
    body, content_type = call.service.metrics.render()
    return Response(body, headers=call.headers | {"content-type": content_type})
