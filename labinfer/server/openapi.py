"""``/openapi.json`` (OpenAPI 3.1): requests from the structs that read them, so that what it says is what is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

import labinfer
from labinfer.protocol import ChatBody, CompletionBody, EmbeddingBody
from labinfer.server.tokenization import DetokenizeBody, TokenizeBody

REFERENCE = "#/components/schemas/{name}"
STREAM = "text/event-stream"
ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "No API key, or none that is valid.",
    404: "No such model, request or path.",
    405: "The path is there for another method.",
    408: "The request took longer than it may.",
    413: "The body is longer than may be.",
    429: "This caller has had its share; see Retry-After.",
    499: "The request was cancelled.",
    500: "The server failed.",
    503: "Loading, full, or shutting down; see Retry-After.",
}


@dataclass(frozen=True)
class Operation:
    """A path and a method as the document describes them."""

    method: str
    path: str
    summary: str
    response: dict[str, Any]
    """JSON schema of a successful answer."""
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    content_type: str = "application/json"
    needs_key: bool = True
    errors: tuple[int, ...] = (401, 405, 500)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
USAGE = _object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
FINISH_REASON = {"enum": ["stop", "length", "tool_calls"]}
CHAT_ANSWER = _object(
    id=STRING,
    object={"const": "chat.completion"},
    created=INTEGER,
    model=STRING,
    choices=_list_of(_object(index=INTEGER, message=_object(role={"const": "assistant"}), finish_reason=FINISH_REASON)),
    usage=USAGE,
)
TEXT_ANSWER = _object(
    id=STRING,
    object={"const": "text_completion"},
    created=INTEGER,
    model=STRING,
    choices=_list_of(_object(index=INTEGER, text=STRING, finish_reason=FINISH_REASON)),
    usage=USAGE,
)
EMBEDDINGS_ANSWER = _object(
    object={"const": "list"},
    data=_list_of(
        _object(
            object={"const": "embedding"},
            index=INTEGER,
            embedding={"oneOf": [_list_of(NUMBER), STRING]},
        )
    ),
    model=STRING,
    usage=_object(prompt_tokens=INTEGER, total_tokens=INTEGER),
)
MODEL = _object(id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING)
ERROR = _object(
    error=_object(message=STRING, type=STRING, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
)
GENERATING = (400, 401, 404, 405, 408, 413, 429, 499, 500, 503)
OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "Answer a conversation.", CHAT_ANSWER, ChatBody, True, errors=GENERATING),
    Operation("POST", "/v1/completions", "Continue texts.", TEXT_ANSWER, CompletionBody, True, errors=GENERATING),
    Operation("POST", "/v1/embeddings", "Texts as vectors.", EMBEDDINGS_ANSWER, EmbeddingBody, errors=GENERATING),
    Operation(
        "POST",
        "/v1/requests/{id}/cancel",
        "End an open request of the same caller; its id is that of the answer, or of the header x-request-id.",
        _object(id=STRING, object={"const": "request.cancelled"}, cancelled={"const": True}),
        errors=(401, 404, 405, 500),
    ),
    Operation(
        "GET", "/v1/models", "The models that are served.", _object(object={"const": "list"}, data=_list_of(MODEL))
    ),
    Operation("GET", "/v1/models/{model}", "One of them.", MODEL, errors=(401, 404, 405, 500)),
    Operation(
        "POST",
        "/tokenize",
        "A text or a conversation as token ids.",
        _object(tokens=_list_of(INTEGER), count=INTEGER, max_model_len=INTEGER),
        TokenizeBody,
        errors=(400, 401, 404, 405, 413, 500, 503),
    ),
    Operation(
        "POST",
        "/detokenize",
        "Token ids as text.",
        _object(prompt=STRING),
        DetokenizeBody,
        errors=(400, 401, 404, 405, 413, 500, 503),
    ),
    Operation("GET", "/health", "The server is alive.", _object(status=STRING), needs_key=False, errors=(405, 500)),
    Operation("GET", "/ready", "It takes requests.", _object(status=STRING), needs_key=False, errors=(405, 500, 503)),
    Operation("GET", "/version", "Its version.", _object(version=STRING), needs_key=False, errors=(405, 500)),
    Operation("GET", "/metrics", "Figures for Prometheus.", STRING, content_type="text/plain"),
    Operation("GET", "/openapi.json", "This document.", {"type": "object"}, needs_key=False, errors=(405, 500)),
)


def describe_api() -> dict[str, Any]:
    """The whole document."""
    bodies = [one.body for one in OPERATIONS if one.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _describe(one)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "LABInfer",
            "version": labinfer.__version__,
            "description": "OpenAI's API over models that run on your own machines.",
        },
        "paths": paths,
        "components": {
            "schemas": components | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(one: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {one.content_type: {"schema": one.response}}
    if one.streams:
        content[STREAM] = {"schema": STRING}
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(name="Error")}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    responses |= {str(status): {"description": ERRORS[status], "content": error} for status in one.errors}
    described: dict[str, Any] = {
        "summary": one.summary,
        "operationId": _operation_id(one),
        "responses": responses,
    }
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": STRING} for name in names]
    if one.body is not None:
        schema = {"$ref": REFERENCE.format(name=one.body.__name__)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if one.needs_key:
        described["security"] = [{"key": []}, {}]  # nothing is asked for where no key is set
    return described


def _operation_id(one: Operation) -> str:
    words = [part.strip("{}") for part in one.path.replace(".", "_").split("/") if part]
    return "_".join([one.method.lower(), *words])
