"""Lists of all endpoints: of the API (with ``/openapi.json``), and of the web pages."""

from __future__ import annotations

from functools import lru_cache

import msgspec
from starlette.responses import Response

from labinfer.server.gateway.endpoint import endpoint, module_endpoints
from labinfer.server.gateway.http_context import JSON, HttpContext
from labinfer.server.gateway.openapi import describe_api
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.routes import (
    batches,
    chat,
    cluster,
    completions,
    embeddings,
    files,
    health,
    layout,
    messages,
    models,
    pages,
    pooling,
    requests,
    responses,
    tokenization,
)


@endpoint("GET", "/openapi.json", needs_key=False, logged=False, answer=dict)
async def openapi(context: HttpContext) -> Response:
    """OpenAPI document of this server's API."""
    service = context.service
    vocab_size = max((model.info.vocab_size for model in service.models.values()), default=0)
    document = _document(tuple(service.model_names), vocab_size, service.options, service.keys.required)
    return Response(document, headers=context.headers, media_type=JSON)


@lru_cache(2)
def _document(model_names: tuple[str, ...], vocab_size: int, options: ServerOptions, keys_required: bool) -> bytes:
    endpoints = [endpoint.with_options(options, keys_required) for endpoint in API]
    return msgspec.json.encode(describe_api(endpoints, model_names, vocab_size))


MODEL_API = (chat, completions, embeddings, pooling, tokenization, responses, messages, files, batches)
"""Modules of the endpoints of OpenAI's, vLLM's and Anthropic's APIs: their endpoints run a model, or store inputs and results of
one."""
API = module_endpoints(*MODEL_API, requests, models, cluster, layout, health) + openapi.endpoints
"""Endpoints for programs, described in /openapi.json."""
PAGES = module_endpoints(pages)
"""Endpoints that serve web pages to browsers."""
