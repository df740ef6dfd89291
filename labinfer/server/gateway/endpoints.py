"""The endpoints: which path is answered by whom, and what ``/openapi.json`` says of it."""

from __future__ import annotations

from functools import lru_cache

import msgspec
from starlette.responses import Response

from labinfer.requests.anthropic.models import AnthropicModel, AnthropicModelList
from labinfer.requests.openai.models import ModelEntry, ModelList
from labinfer.server.gateway.cluster_answers import Cluster, LayoutChanged, StatsEvent, TraceEvent, TraceFile
from labinfer.server.gateway.http_context import JSON, HttpContext
from labinfer.server.gateway.model_endpoints import MODEL_API, READING, STORED
from labinfer.server.gateway.openapi import ANYWHERE, INTEGER, NUMBER, STRING, Endpoint, describe_api
from labinfer.server.gateway.routes import cluster, health, layout, models, pages, requests
from labinfer.server.link.layout_change import LayoutChange

LOOKING = (*ANYWHERE, 404, 503)
"""Statuses of errors of endpoints that look at a model at work."""


async def openapi(context: HttpContext) -> Response:
    """``GET /openapi.json``."""
    service = context.service
    vocab_size = max((model.info.vocab_size for model in service.models.values()), default=0)
    document = _document(tuple(service.model_names), vocab_size, service.keys.required)
    return Response(document, headers=context.headers, media_type=JSON)


@lru_cache(2)
def _document(model_names: tuple[str, ...], vocab_size: int, needs_key: bool) -> bytes:
    return msgspec.json.encode(describe_api(API, list(model_names), vocab_size, needs_key))


API = (
    *MODEL_API,
    Endpoint(
        method="POST",
        path="/v1/requests/{id}/cancel",
        handler=requests.cancel,
        summary="End an open request of the same caller; its id is that of the answer, or of the header x-request-id.",
        answer=requests.Cancelled,
        errors=STORED,
    ),
    Endpoint(
        method="GET",
        path="/v1/requests",
        handler=requests.list_open,
        logged=False,
        summary="Open requests to a model, their ages and how far they are.",
        answer=requests.RequestList,
        query=(("model", STRING),),
        errors=LOOKING,
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=models.list_models,
        logged=False,
        summary="The models, in Anthropic's form with the header anthropic-version.",
        answer=ModelList | AnthropicModelList,
        query=(
            ("limit", INTEGER | {"minimum": 1, "maximum": models.MAX_PAGE}),
            ("after_id", STRING),
            ("before_id", STRING),
        ),
        is_anthropics_too=True,
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{model:path}",
        handler=models.show_model,
        logged=False,
        summary="One of them.",
        answer=ModelEntry | AnthropicModel,
        is_anthropics_too=True,
        errors=STORED,
    ),
    Endpoint(
        method="GET",
        path="/v1/cluster",
        handler=cluster.show,
        logged=False,
        summary="The ranks of a model, and its stats of the last minutes.",
        answer=Cluster,
        query=(("model", STRING),),
        errors=LOOKING,
    ),
    Endpoint(
        method="GET",
        path="/v1/cluster/events",
        handler=cluster.events,
        logged=False,
        summary="Stats and steps of a model as they come; for so many seconds, or until the client goes.",
        events=(StatsEvent, TraceEvent),
        query=(("model", STRING), ("seconds", NUMBER | {"minimum": 0, "maximum": cluster.MAX_EVENTS_SECONDS})),
        errors=LOOKING,
    ),
    Endpoint(
        method="GET",
        path="/v1/cluster/trace",
        handler=cluster.trace,
        logged=False,
        summary="A model's steps while somebody watched, or in so many seconds from now, for Perfetto.",
        answer=TraceFile,
        query=(("model", STRING), ("seconds", NUMBER | {"minimum": 0, "maximum": cluster.MAX_TRACE_SECONDS})),
        errors=LOOKING,
    ),
    Endpoint(
        method="POST",
        path="/v1/cluster/layout",
        handler=layout.change,
        summary="Serve a model in another layout, or with other precision; what is open pauses, and goes on.",
        body=LayoutChange,
        answer=LayoutChanged,
        errors=(*READING, 409),
    ),
    Endpoint(
        method="GET",
        path="/v1/cluster/workload",
        handler=cluster.workload,
        logged=False,
        summary="Arrivals and lengths of the last 4096 requests of a model that ran to their ends, one JSON object in each line.",
        answer=str,
        content_type=cluster.JSONL,
        query=(("model", STRING),),
        errors=LOOKING,
    ),
    Endpoint(
        method="GET",
        path="/health",
        handler=health.health,
        needs_key=False,
        logged=False,
        summary="The server is alive.",
        answer=health.Health,
    ),
    Endpoint(
        method="GET",
        path="/ready",
        handler=health.ready,
        needs_key=False,
        logged=False,
        summary="It takes requests.",
        answer=health.Readiness,
        errors=(*ANYWHERE, 503),
    ),
    *(
        Endpoint(
            method=method,
            path="/ping",
            handler=health.ping,
            needs_key=False,
            logged=False,
            summary="The server is alive, as SageMaker asks.",
            answer=health.Pong,
        )
        for method in ("GET", "POST")
    ),
    Endpoint(
        method="GET",
        path="/load",
        handler=health.load,
        logged=False,
        summary="Requests that are open.",
        answer=health.ServerLoad,
    ),
    Endpoint(
        method="GET",
        path="/version",
        handler=health.version,
        needs_key=False,
        logged=False,
        summary="Its version.",
        answer=health.Version,
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        handler=health.metrics,
        opened_by="metrics_open",
        logged=False,
        summary="Metrics for Prometheus.",
        answer=str,
        content_type="text/plain",
    ),
    Endpoint(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        needs_key=False,
        logged=False,
        summary="This document.",
        answer=dict,
    ),
)
"""Endpoints for programs, which /openapi.json describes."""
PAGES = (
    Endpoint(method="GET", path="/", handler=pages.chat, needs_key=False, logged=False),
    Endpoint(method="GET", path="/cluster", handler=pages.cluster, needs_key=False, logged=False),
    Endpoint(method="GET", path="/webui/{path:path}", handler=pages.file, needs_key=False, logged=False),
)
"""Endpoints for people."""
