"""``/openapi.json`` (OpenAPI 3.1), generated from the structs that decode requests and encode answers.

It therefore states what is checked and what is sent. Stream events, which only OpenAPI 3.2 can describe, are under
``x-itemSchema`` as they would be under ``itemSchema`` there. JSON schema cannot express rules between fields and token
counts; every other invalid request is invalid by the document too.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import UnionType
from typing import Any, get_args

import msgspec

import labinfer
from labinfer.base.sampling_params import MAX_LOGPROBS, sampling_parameters
from labinfer.requests.protocol import NEUTRAL_VALUES, TOKEN_ID, ChatBody, CompletionBody, OpenAIBody
from labinfer.server.gateway.endpoint import INTEGER, STRING, Endpoint
from labinfer.server.gateway.error_form import ErrorForm
from labinfer.server.gateway.http_context import JSON
from labinfer.text.messages import UNREAD_PARTS

COMPONENT = "#/components/{kind}/{name}"
STREAM, ITEM_SCHEMA, FORM = "text/event-stream", "x-itemSchema", "multipart/form-data"
ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "No API key, or none that is valid.",
    403: "It comes from a page of another server.",
    404: "No such model, request or path.",
    405: "The path is there for another method.",
    408: "The request took longer than it may.",
    409: "It cannot be done now, or could not be.",
    413: "The body is longer than may be.",
    415: "The body does not say that it is JSON.",
    421: "The server is not to be reached by this name.",
    429: "This caller has had its share.",
    431: "The head is longer than may be.",
    499: "The request was cancelled.",
    500: "The server failed.",
    503: "Loading, full, or shutting down.",
}


# Bounds that the structs leave to code, and values that depend on the served models.

PART_FIELDS: dict[str, dict[str, Any]] = {
    "StructuredOutputs": {"json_object": {"enum": [True, None]}},
    "Function": {"parameters": {"properties": {"type": {"const": "object"}}}},
}
"""Bounds on fields of structs nested in bodies. Each keyword applies to values of its own type, and not to null."""
LOGPROBS: dict[type, dict[str, Any]] = {
    ChatBody: {"type": ["boolean", "null"]},
    CompletionBody: {"anyOf": [INTEGER | {"minimum": 0, "maximum": MAX_LOGPROBS}, {"enum": [False, None]}]},
}


def describe_api(
    endpoints: Iterable[Endpoint], model_names: Iterable[str], vocab_size: int, needs_key: bool
) -> dict[str, Any]:
    """Build the whole document.

    Args:
        vocab_size: largest vocabulary of the models; 0 if not known yet.
        needs_key: whether an API key is required.
    """
    endpoints, names = list(endpoints), list(model_names)
    read = dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    bodies = _body_schemas(list(read), names, vocab_size)
    forms = _plain_schemas([endpoint.form for endpoint in endpoints if endpoint.form is not None])
    answers = _answer_schemas({kind for endpoint in endpoints for kind in _answer_kinds(endpoint)})
    assert not bodies.keys() & answers.keys(), f"two structs are called {bodies.keys() & answers.keys()}"
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.template, {})[endpoint.method.lower()] = _describe(endpoint, names, needs_key)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "LABInfer",
            "version": labinfer.__version__,
            "description": "OpenAI's API, and Anthropic's, over models that run on your own machines.",
        },
        "paths": paths,
        "components": {
            "schemas": bodies | forms | answers,
            "responses": {
                form.name + str(status): _describe_error(status, form)
                for form in dict.fromkeys(endpoint.error_form for endpoint in endpoints)
                for status in ERRORS
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _answer_kinds(endpoint: Endpoint) -> list[type[msgspec.Struct]]:
    """All structs that an endpoint may answer with."""
    whole = [kind for kind in get_args(endpoint.answer) or [endpoint.answer] if isinstance(kind, type(msgspec.Struct))]
    return [*whole, *endpoint.events, endpoint.error_form.answer]


def _plain_schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, dict[str, Any]]:
    _, schemas = msgspec.json.schema_components(kinds, ref_template=COMPONENT.format(kind="schemas", name="{name}"))
    return schemas


def _answer_schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, dict[str, Any]]:
    """Schemas of encoded structs: every field that is not ``UNSET`` is required, also one with a default."""
    schemas = _plain_schemas(kinds)
    for schema in schemas.values():
        properties = schema.get("properties", {})
        required = set(schema.pop("required", ()))
        required |= {name for name, field in properties.items() if field.pop("default", required) is not required}
        if required:
            schema["required"] = [name for name in properties if name in required]
    return schemas


def _body_schemas(
    bodies: list[type[msgspec.Struct]], model_names: list[str], vocab_size: int
) -> dict[str, dict[str, Any]]:
    """Schemas of decoded structs, with the bounds that the structs do not express."""
    schemas = _plain_schemas(bodies)
    for body in bodies:
        _bound(body, schemas[body.__name__]["properties"], model_names)
    for part in UNREAD_PARTS:
        schemas[part.__name__] = {"description": part.__doc__, "not": {}}
    for part, bounds in PART_FIELDS.items():
        for name, bound in bounds.items():
            schemas[part]["properties"][name] |= bound
    if vocab_size:
        _bound_token_ids(schemas, vocab_size - 1)
    return schemas


def _bound(body: type[msgspec.Struct], properties: dict[str, Any], model_names: list[str]) -> None:
    """Add the bounds of a body's fields that its struct does not express."""
    neutral = NEUTRAL_VALUES.keys() - body.supported if issubclass(body, OpenAIBody) else ()
    for name in properties:
        if "oneOf" in properties[name]:
            properties[name].pop("anyOf")  # a less detailed duplicate
        if name in neutral:
            properties[name] = {"enum": [*NEUTRAL_VALUES[name], None], "default": None}
    if "logits_processors" in properties:
        for name, parameter in sampling_parameters().items():
            kind = "integer" if parameter.kind is int else "number"
            bounds = {"minimum": parameter.least, "maximum": parameter.most}
            properties[name] = {"type": [kind, "null"], **bounds, "description": parameter.help, "default": None}
    if "model" in properties:
        properties["model"] = {"enum": [*model_names, None], "default": None}
    if issubclass(body, OpenAIBody):
        properties["logprobs"] = LOGPROBS[body] | {"default": None}


def _bound_token_ids(schema: Any, largest: int) -> None:
    """Set the maximum of every token id in ``schema``."""
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_ID:
            schema["maximum"] = largest
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _bound_token_ids(part, largest)


def _describe(endpoint: Endpoint, model_names: list[str], needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content[endpoint.content_type] = {"schema": _schema(endpoint.answer)}
    if endpoint.events:
        events = _event_schema((*endpoint.events, endpoint.error_form.answer))
        content[STREAM] = {"schema": STRING, ITEM_SCHEMA: events}
    errors = endpoint.errors + ((401,) if endpoint.needs_key else ())
    described: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": _operation_id(endpoint),
        "responses": {"200": {"description": "Done.", "headers": _headers(200), "content": content}}
        | {str(status): _reference("responses", endpoint.error_form.name + str(status)) for status in sorted(errors)},
    }
    model = {"enum": model_names}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": model if name == "model" else STRING}
        for name in (part[1:-1] for part in endpoint.template.split("/") if part.startswith("{"))
    ]
    parameters += [
        {"name": name, "in": "query", "schema": model if name == "model" else schema} for name, schema in endpoint.query
    ]
    if parameters:
        described["parameters"] = parameters
    if endpoint.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": _schema(endpoint.body)}}}
    if endpoint.form is not None:
        described["requestBody"] = {"required": True, "content": {FORM: {"schema": _schema(endpoint.form)}}}
    if endpoint.needs_key and needs_key:
        described["security"] = [{"key": []}, {"header": []}]
    return described


def _describe_error(status: int, form: ErrorForm) -> dict[str, Any]:
    content = {JSON: {"schema": _schema(form.answer)}}
    return {"description": ERRORS[status], "headers": _headers(status), "content": content}


def _headers(status: int) -> dict[str, Any]:
    named = {
        401: ("WWW-Authenticate", "How to say who calls.", STRING),
        405: ("Allow", "The methods that are there.", STRING),
        429: ("Retry-After", "Seconds until it is worth trying again.", INTEGER | {"minimum": 0}),
        503: ("Retry-After", "Seconds until it is worth trying again.", INTEGER | {"minimum": 0}),
    }
    headers = [("x-request-id", "The request's id, for the server's log; that of the request if it has one.", STRING)]
    headers += [named[status]] if status in named else []
    return {name: {"description": description, "schema": schema} for name, description, schema in headers}


def _schema(kind: type | UnionType) -> dict[str, Any]:
    """Schema of a struct as a reference, of any other type inline."""
    if isinstance(kind, type(msgspec.Struct)):
        return _reference("schemas", kind.__name__)
    if isinstance(kind, UnionType):
        return {"anyOf": [_schema(part) for part in get_args(kind)]}
    return msgspec.json.schema(kind)


def _event_schema(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    """Schema of a stream event: one of ``kinds``, or the end marker."""
    contents = {"anyOf": [_schema(kind) for kind in kinds]}
    data = STRING | {"contentMediaType": JSON, "contentSchema": contents}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def _reference(kind: str, name: str) -> dict[str, str]:
    return {"$ref": COMPONENT.format(kind=kind, name=name)}


def _operation_id(endpoint: Endpoint) -> str:
    words = [part.strip("{}") for part in endpoint.template.replace(".", "_").split("/") if part]
    return "_".join([endpoint.method.lower(), *words])
