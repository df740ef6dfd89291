"""The ASGI application: which path is answered by what, and how every failure becomes OpenAI's error object."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import lru_cache

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from labinfer.errors import is_failure
from labinfer.gateway.access import Denied
from labinfer.gateway.call import ID_HEADER, JSON, WARNING_HEADER, Call
from labinfer.gateway.cluster_answers import Cluster, StatsEvent, TraceEvent, TraceFile
from labinfer.gateway.host_check import AllowedHosts, HostCheck
from labinfer.gateway.limits import LimitReached, ServerFull
from labinfer.gateway.openapi import ANYWHERE, NUMBER, STRING, Endpoint, describe_api
from labinfer.gateway.routes import (
    chat,
    cluster,
    completions,
    embeddings,
    health,
    models,
    pages,
    pooling,
    requests,
    tokenization,
)
from labinfer.gateway.service import Service
from labinfer.openai import api_errors
from labinfer.openai.api_errors import ApiError
from labinfer.openai.chat import ChatCompletion, ChatCompletionChunk
from labinfer.openai.completions import TextCompletion, TextCompletionChunk
from labinfer.openai.embeddings import EmbeddingList
from labinfer.openai.models import ModelEntry, ModelList
from labinfer.openai.scores import PooledList, Ranking, ScoreList
from labinfer.protocol import ChatBody, CompletionBody, EmbeddingBody

logger = logging.getLogger(__name__)

NO_ROUTE = "none"
READING = (*ANYWHERE, 404, 413, 415, 429, 503)
"""Statuses of errors of endpoints that read a body."""
GENERATING = (*READING, 408, 499)
LOOKING = (*ANYWHERE, 404, 503)


async def openapi(call: Call) -> Response:
    """``GET /openapi.json``."""
    service = call.service
    vocab_size = max((model.info.vocab_size for model in service.models.values()), default=0)
    document = _document(tuple(service.model_names), vocab_size, service.keys.required)
    return Response(document, headers=call.headers, media_type=JSON)


@lru_cache(2)
def _document(model_names: tuple[str, ...], vocab_size: int, needs_key: bool) -> bytes:
    return msgspec.json.encode(describe_api(API, list(model_names), vocab_size, needs_key))


API = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=chat.answer,
        summary="Answer a conversation.",
        body=ChatBody,
        answer=ChatCompletion,
        events=(ChatCompletionChunk,),
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=completions.answer,
        summary="Continue texts.",
        body=CompletionBody,
        answer=TextCompletion,
        events=(TextCompletionChunk,),
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings.answer,
        summary="Texts as vectors.",
        body=EmbeddingBody,
        answer=EmbeddingList,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/pooling",
        handler=pooling.pool,
        summary="Texts as vectors, with vLLM's fields.",
        body=EmbeddingBody,
        answer=PooledList,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/score",
        aliases=("/v1/score",),
        handler=pooling.score,
        summary="How alike pairs of texts are: the cosine of their vectors.",
        body=pooling.ScoreBody,
        answer=ScoreList,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/rerank",
        aliases=("/v1/rerank", "/v2/rerank"),
        handler=pooling.rerank,
        summary="Documents in the order of their likeness to a query.",
        body=pooling.RerankBody,
        answer=Ranking,
        errors=GENERATING,
    ),
    Endpoint(
        method="POST",
        path="/v1/requests/{id}/cancel",
        handler=requests.cancel,
        summary="End an open request of the same caller; its id is that of the answer, or of the header x-request-id.",
        answer=requests.Cancelled,
        errors=(*ANYWHERE, 404),
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=models.list_models,
        logged=False,
        summary="The models.",
        answer=ModelList,
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{model:path}",
        handler=models.show_model,
        logged=False,
        summary="One of them.",
        answer=ModelEntry,
        errors=(*ANYWHERE, 404),
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
        path="/tokenize",
        handler=tokenization.tokenize,
        summary="A text or a conversation as token ids.",
        body=tokenization.TokenizeBody,
        answer=tokenization.Tokens,
        errors=READING,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=tokenization.detokenize,
        summary="Token ids as text.",
        body=tokenization.DetokenizeBody,
        answer=tokenization.Text,
        errors=READING,
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


def make_app(service: Service) -> Starlette:
    """The application over one service."""
    routes = [
        Route(path, _guard(service, endpoint), methods=[endpoint.method])
        for endpoint in (*API, *PAGES)
        for path in (endpoint.path, *endpoint.aliases)
    ]

    async def on_http_exception(http: Request, error: Exception) -> Response:
        call = Call(service, http, NO_ROUTE)
        return _answer_error(call, _routing_error(http, error, routes), logged=True)

    def refuse(http: Request, error: ApiError) -> Response:
        return _answer_error(Call(service, http, NO_ROUTE), error, logged=True)

    options = service.options
    hosts = AllowedHosts(options.allowed_hosts, options.host, options.allowed_origins)
    middleware = [Middleware(HostCheck, hosts=hosts, refuse=refuse)]
    if options.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[origin.lower() for origin in options.allowed_origins],
                allow_methods=sorted({endpoint.method for endpoint in API}),
                allow_headers=("*",),
                expose_headers=(ID_HEADER, WARNING_HEADER, "retry-after"),
            )
        )
    app = Starlette(routes=routes, exception_handlers={HTTPException: on_http_exception}, middleware=middleware)
    app.router.redirect_slashes = False  # a path with one more slash is another path
    return app


def _guard(service: Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    needs_key = endpoint.needs_key and not (endpoint.opened_by and getattr(service.options, endpoint.opened_by))

    async def run(http: Request) -> Response:
        call = Call(service, http, endpoint.path)
        try:
            if needs_key:
                call.caller = service.keys.authenticate(http.headers.get("authorization"))
            response = await endpoint.handler(call)
        except ApiError as error:
            return _answer_error(call, error, endpoint.logged)
        except LimitReached as error:
            refusal = api_errors.rate_limited(error.message, error.retry_after_seconds, error.kind)
            return _answer_error(call, refusal, endpoint.logged)
        except ServerFull as error:
            refusal = api_errors.overloaded(error.message, error.retry_after_seconds)
            return _answer_error(call, refusal, endpoint.logged)
        except Denied as error:
            return _answer_error(call, api_errors.unauthorized(str(error)), endpoint.logged)
        except ClientDisconnect:
            return _answer_error(call, api_errors.cancelled(), endpoint.logged)
        except BaseException as error:  # whatever it is, the other requests go on
            if not is_failure(error):
                raise
            logger.error("request %s failed\n%s", call.id, traceback.format_exc().rstrip())
            return _answer_error(call, api_errors.internal(call.id), logged=True)
        if isinstance(response, Response):  # a stream ends its call itself
            call.end(response.status_code, endpoint.logged)
        return response

    return run


def _answer_error(call: Call, error: ApiError, logged: bool) -> Response:
    call.end(error.status, logged)
    return call.json(error.body(), error.status, error.headers)


def _routing_error(http: Request, error: HTTPException, routes: list[Route]) -> ApiError:
    path = http.scope["path"]  # a URL is made with the header Host, which may be anything
    if error.status_code == 405:
        allowed = [
            method
            for route in routes
            if route.matches(http.scope)[0] is not Match.NONE
            for method in sorted(route.methods or ())
        ]
        return api_errors.method_not_allowed(http.method, path, allowed)
    if error.status_code == 404:
        return api_errors.not_found_route(http.method, path)
    return ApiError(error.status_code, str(error.detail), api_errors.INVALID_REQUEST)
