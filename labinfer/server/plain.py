"""Routes that need no engine: what is there, and how it does."""

from __future__ import annotations

from starlette.responses import Response

import labinfer
from labinfer.recommended_sampling import FIELDS
from labinfer.responses import CHAT_PREFIX, COMPLETION_PREFIX
from labinfer.server import api_errors
from labinfer.server.call import Call
from labinfer.server.openapi import describe_api
from labinfer.server.service import Service

SHOWN_DEFAULTS = (*FIELDS, "presence_penalty", "frequency_penalty")
"""What a model's entry tells of how tokens are drawn where a request says nothing."""


async def list_models(call: Call) -> Response:
    """``GET /v1/models``, as OpenAI's; also while they are loaded."""
    return call.json({"object": "list", "data": [_model(call.service, name) for name in call.service.model_names]})


async def show_model(call: Call) -> Response:
    """``GET /v1/models/{model}``."""
    name = call.http.path_params["model"]
    if name not in call.service.model_names:
        raise api_errors.not_found_model(name)
    return call.json(_model(call.service, name))


async def health(call: Call) -> Response:
    """``GET /health``: the gateway is alive, and so is the engine behind it, or it is still loading."""
    return call.json({"status": "ok"})


async def ready(call: Call) -> Response:
    """``GET /ready``: requests are taken now."""
    call.service.model(None)
    return call.json({"status": "ready", "models": call.service.model_names})


async def version(call: Call) -> Response:
    return call.json({"version": labinfer.__version__})


async def metrics(call: Call) -> Response:
    """``GET /metrics`` for Prometheus."""
    body, content_type = call.service.metrics.render()
    return Response(body, headers=call.headers | {"content-type": content_type})


async def cancel(call: Call) -> Response:
    """``POST /v1/requests/{id}/cancel``: end an open request of the same caller; its KV blocks are free at once.

    The id is that of the response, with or without ``chatcmpl-`` or ``cmpl-``, and that of the header ``x-request-id``.
    """
    given = call.http.path_params["id"]
    ids = (given, given.removeprefix(CHAT_PREFIX), given.removeprefix(COMPLETION_PREFIX))
    if not any(call.service.engine.cancel(id, call.caller.name) for id in ids):
        raise api_errors.not_found_request(given)
    return call.json({"id": given, "object": "request.cancelled", "cancelled": True})


async def openapi(call: Call) -> Response:
    """``GET /openapi.json``."""
    service = call.service
    vocab_size = max((model.info.vocab_size for model in service.models.values()), default=0)
    return call.json(describe_api(service.model_names, vocab_size, service.keys.required))


def _model(service: Service, name: str) -> dict:
    entry = {"id": name, "object": "model", "created": service.started, "owned_by": "labinfer"}
    if name in service.models:
        model = service.models[name]
        entry["max_model_len"] = model.info.max_model_len
        defaults = model.chat_defaults()
        entry["default_sampling"] = {name: getattr(defaults, name) for name in SHOWN_DEFAULTS}
    return entry
