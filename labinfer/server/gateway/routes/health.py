"""Routes that need no engine: health, readiness, version and metrics."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.responses import Response

import labinfer
from labinfer.base.heartbeat import Wait
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_object import ApiObject, Count
from labinfer.server.gateway.admission_control import LOADING_SECONDS
from labinfer.server.gateway.endpoint import COMMON_ERRORS, endpoint
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.service import Service

State = Literal["ok", "idle", "loading", "stalled", "recovering", "rebuilding", "draining"]


class RankWait(ApiObject):
    """A wait of a rank, or of the gateway (``rank`` null), in seconds. ``peers`` are the ranks that are awaited: ``1``, ``1-3`` or
    ``0, 2``."""

    seconds: float
    rank: Count | None
    peers: str
    step: Count | None
    """Id of the step that is blocked; null before the first step."""


class Health(ApiObject):
    """State of a server: ``ok`` (requests run), ``idle`` (no requests), ``loading`` (models), ``stalled`` (no heartbeats, or no finished
    steps), ``recovering`` (the next engine resumes the requests of one that died), ``rebuilding`` (models are reloaded in another layout)
    or ``draining`` (shutdown)."""

    status: State
    wait: RankWait | UnsetType = UNSET
    """The wait that blocks the open requests, if it has lasted 5 s."""


class Readiness(ApiObject):
    """Response of a server that accepts requests, with its models."""

    status: Literal["ready"]
    models: list[str]


class Version(ApiObject):
    """Version of the server."""

    version: str


class Pong(ApiObject):
    """Response of a server that is alive."""


class ServerLoad(ApiObject):
    """Number of open requests, running or waiting."""

    server_load: Count


@endpoint("GET", "/health", needs_key=False, logged=False, answer=Health, statuses=(200, 503))
async def health(context: HttpContext) -> Response:
    """Liveness probe.

    200 while the engine lives, loads or restarts; 503 if it is stalled.
    """
    state = _state(context.service)
    wait = context.service.engine.wait
    return context.json(Health(state, _describe_wait(wait) if wait else UNSET), 503 if state == "stalled" else 200)


def _describe_wait(wait: Wait) -> RankWait:
    return RankWait(round(wait.seconds, 1), wait.rank, wait.peers, wait.step if wait.step >= 0 else None)


def _state(service: Service) -> State:
    engine = service.engine
    if engine.is_stalled:
        return "stalled"
    if engine.is_draining:
        return "draining"
    if engine.is_recovering:
        return "recovering"
    if engine.is_rebuilding:
        return "rebuilding"
    if not service.models:
        return "loading"
    return "ok" if engine.has_work else "idle"


@endpoint("GET", "/ready", needs_key=False, logged=False, answer=Readiness, errors=(*COMMON_ERRORS, 503))
async def ready(context: HttpContext) -> Response:
    """Readiness probe.

    200 if requests are taken, also long prompts and new structured-output grammars; 503 otherwise.
    """
    context.service.model(None)
    if context.service.engine.is_silent:
        raise api_errors.overloaded("no heartbeat from the engine", LOADING_SECONDS)
    if context.service.engine.is_recovering:
        raise api_errors.overloaded("the engine has died and is being restarted", LOADING_SECONDS)
    if context.service.engine.is_rebuilding:
        raise api_errors.overloaded("the models are being loaded in another layout", LOADING_SECONDS)
    context.service.check_room()
    return context.json(Readiness("ready", context.service.model_names))


@endpoint("GET", "/version", needs_key=False, logged=False, answer=Version)
async def version(context: HttpContext) -> Response:
    """The server's version."""
    return context.json(Version(labinfer.__version__))


@endpoint("POST", "/ping", needs_key=False, logged=False, answer=Pong, statuses=(200, 503))
@endpoint("GET", "/ping", needs_key=False, logged=False, answer=Pong, statuses=(200, 503))
async def ping(context: HttpContext) -> Response:
    """Liveness probe of SageMaker."""
    return context.json(Pong(), 503 if _state(context.service) == "stalled" else 200)


@endpoint("GET", "/load", logged=False, answer=ServerLoad)
async def load(context: HttpContext) -> Response:
    """Number of open requests."""
    return context.json(ServerLoad(context.service.admission.num_open))


@endpoint("GET", "/metrics", opened_by="metrics_open", logged=False, answer=str, content_type="text/plain")
async def metrics(context: HttpContext) -> Response:
    """Metrics of gateway and engine, in Prometheus' text format."""
    body, content_type = context.service.metrics.render()
    return Response(body, headers=context.headers | {"content-type": content_type})
