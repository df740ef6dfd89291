"""``/openapi.json`` (OpenAPI 3.1), generated from the structs that decode requests and encode answers.

The document matches the requests that the server accepts and the responses that it sends. Events of streams are under
``x-itemSchema``, an extension in the format of OpenAPI 3.2's ``itemSchema``, as OpenAPI 3.1 cannot describe them. The document
rejects every request that the server rejects, except for rules between fields and limits of token counts, which JSON schema cannot
express.
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
from labinfer.server.gateway.error_form import ANTHROPIC_ERRORS, OPENAI_ERRORS, ErrorForm
from labinfer.server.gateway.http_context import ID_HEADER, JSON, WARNING_HEADER
from labinfer.server.gateway.packed_body import GZIP_NAMES
from labinfer.text.messages import UNREAD_PARTS

COMPONENT = "#/components/{kind}/{name}"
STREAM, ITEM_SCHEMA, FORM = "text/event-stream", "x-itemSchema", "multipart/form-data"
ANSWERS = {200: "Success.", 206: "A range of the file.", 503: "The engine is stalled."}
ERRORS = {
    400: "A field, a parameter or the HTTP message is invalid; `param` names the field.",
    401: "The API key is missing or invalid.",
    403: "The request comes from a page of another origin.",
    404: "The model, object or path does not exist.",
    405: "The path exists for other methods only.",
    408: "The request timeout has passed.",
    409: "The server's state does not allow the request.",
    413: "The body is too long.",
    415: "The content type or the content encoding is not supported.",
    416: "The range lies outside the file.",
    421: "The host name is not one of this server's.",
    429: "The caller has reached a limit.",
    431: "The request header is too long.",
    499: "The request was cancelled.",
    500: "The server has failed.",
    503: "The server is loading, at capacity, or shutting down.",
}


# Bounds that code checks in place of the structs, and values that depend on the served models.

PART_FIELDS: dict[str, dict[str, Any]] = {
    "StructuredOutputs": {"json_object": {"enum": [True, None]}},
    "Function": {"parameters": {"properties": {"type": {"const": "object"}}}},
}
"""JSON schema keywords for fields of structs inside bodies, by struct and field. A keyword applies only to values of
its type, and never to null."""
LOGPROBS: dict[type, dict[str, Any]] = {
    ChatBody: {"type": ["boolean", "null"]},
    CompletionBody: {"anyOf": [INTEGER | {"minimum": 0, "maximum": MAX_LOGPROBS}, {"enum": [False, None]}]},
}


def describe_api(endpoints: Iterable[Endpoint], model_names: Iterable[str], vocab_size: int) -> dict[str, Any]:
    """Make the whole content of ``/openapi.json``.

    Args:
        vocab_size: size of the models' largest vocabulary; 0 if it is not known yet.
    """
    endpoints, names = list(endpoints), list(model_names)
    read = dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    bodies = _body_schemas(list(read), names, vocab_size)
    forms = _plain_schemas([endpoint.form for endpoint in endpoints if endpoint.form is not None])
    answers = _answer_schemas({kind for endpoint in endpoints for kind in _answer_kinds(endpoint)})
    assert not bodies.keys() & answers.keys(), f"two structs are called {bodies.keys() & answers.keys()}"
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        for template in endpoint.templates:
            paths.setdefault(template, {})[endpoint.method.lower()] = _describe(endpoint, template, names)
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
                _error_name(forms, status): _describe_error(status, forms)
                for forms, status in dict.fromkeys(
                    (_error_forms(endpoint, status), status)
                    for endpoint in endpoints
                    for status in endpoint.error_statuses
                )
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _answer_kinds(endpoint: Endpoint) -> list[type[msgspec.Struct]]:
    """All structs that a response of the endpoint may consist of."""
    whole = [kind for kind in get_args(endpoint.answer) or [endpoint.answer] if isinstance(kind, type(msgspec.Struct))]
    return [*whole, *endpoint.events, endpoint.error_form.answer]


def _plain_schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, dict[str, Any]]:
    _, schemas = msgspec.json.schema_components(kinds, ref_template=COMPONENT.format(kind="schemas", name="{name}"))
    return schemas


def _answer_schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, dict[str, Any]]:
    """JSON schemas of response structs: every field that is not ``UNSET`` is required, even if it has a default."""
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
    """JSON schemas of request structs, including bounds that the structs do not express."""
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
    """Add bounds that the struct ``body`` does not express to ``properties``, the JSON schemas of its fields."""
    neutral = NEUTRAL_VALUES.keys() - body.supported if issubclass(body, OpenAIBody) else ()
    for name in properties:
        if "oneOf" in properties[name]:
            properties[name].pop("anyOf")  # duplicates of the keywords added here, with less detail
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
    """Set the maximum of every token id in ``schema`` to ``largest``."""
    if isinstance(schema, dict):
        if schema.get("title") == TOKEN_ID:
            schema["maximum"] = largest
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _bound_token_ids(part, largest)


def _describe(endpoint: Endpoint, template: str, model_names: list[str]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content[endpoint.content_type] = {"schema": _schema(endpoint.answer)}
    if endpoint.events:
        events = _event_schema((*endpoint.events, endpoint.error_form.answer))
        content[STREAM] = {"schema": STRING, ITEM_SCHEMA: events}
    responses = {
        str(status): _reference("responses", _error_name(_error_forms(endpoint, status), status))
        for status in endpoint.error_statuses
    }
    for status in endpoint.statuses:
        headers = _headers(status, has_warnings=endpoint.body is not None)
        responses[str(status)] = {"description": ANSWERS[status], "headers": headers, "content": content}
    described: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": _operation_id(endpoint.method, template),
        "responses": dict(sorted(responses.items())),
    }
    model = {"enum": model_names}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": model if name == "model" else STRING}
        for name in (part[1:-1] for part in template.split("/") if part.startswith("{"))
    ]
    parameters += [
        {"name": name, "in": "query", "schema": model if name == "model" else schema} for name, schema in endpoint.query
    ]
    if endpoint.body is not None:
        parameters.append(
            {"name": "Content-Encoding", "in": "header", "schema": {"enum": ["", "identity", *GZIP_NAMES]}}
        )
    if parameters:
        described["parameters"] = parameters
    if endpoint.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": _schema(endpoint.body)}}}
    if endpoint.form is not None:
        described["requestBody"] = {"required": True, "content": {FORM: {"schema": _schema(endpoint.form)}}}
    if endpoint.needs_key:
        described["security"] = [{"key": []}, {"header": []}]
    return described


def _error_forms(endpoint: Endpoint, status: int) -> tuple[ErrorForm, ...]:
    """Formats in which ``endpoint`` may report an error. A header that is too long is refused before the path is known, so it has
    all formats."""
    if status == 431:
        return (OPENAI_ERRORS,)
    return (OPENAI_ERRORS, ANTHROPIC_ERRORS) if endpoint.is_anthropics_too else (endpoint.error_form,)


def _error_name(forms: tuple[ErrorForm, ...], status: int) -> str:
    """Name of the response with ``status`` that has one of the error formats ``forms``."""
    return f"{'Either' if len(forms) > 1 else forms[0].name}{status}"


def _describe_error(status: int, forms: tuple[ErrorForm, ...]) -> dict[str, Any]:
    schemas = [_schema(form.answer) for form in forms]
    content = {JSON: {"schema": {"anyOf": schemas} if len(schemas) > 1 else schemas[0]}}
    return {"description": ERRORS[status], "headers": _headers(status, has_warnings=True), "content": content}


def _headers(status: int, has_warnings: bool) -> dict[str, Any]:
    """OpenAPI description of the headers that responses with ``status`` may have."""
    retry_after = ("Retry-After", "Seconds after which a retry may succeed.", INTEGER | {"minimum": 0})
    should_retry = ("x-should-retry", "`false` if a retry fails as well.", {"const": "false"})
    named = {
        401: ("WWW-Authenticate", "Authentication scheme.", STRING),
        405: ("Allow", "Methods of the path.", STRING),
        408: should_retry,
        409: should_retry,
        415: ("Accept-Encoding", "Supported content encoding, if that of the request is not.", STRING),
        429: retry_after,
        500: should_retry,
        503: retry_after,
    }
    headers = [(ID_HEADER, "Request id, also in the server's log; the client's own if it sent one.", STRING)]
    if has_warnings:
        headers.append((WARNING_HEADER, "Parts of the request that were ignored.", STRING))
    headers += [named[status]] if status in named else []
    return {name: {"description": description, "schema": schema} for name, description, schema in headers}


def _schema(kind: type | UnionType) -> dict[str, Any]:
    """JSON schema of a type: a reference to the schema of a struct, or the schema itself for any other type."""
    if isinstance(kind, type(msgspec.Struct)):
        return _reference("schemas", kind.__name__)
    if isinstance(kind, UnionType):
        return {"anyOf": [_schema(part) for part in get_args(kind)]}
    return msgspec.json.schema(kind)


def _event_schema(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    """JSON schema of a stream event: one of ``kinds``, or the end marker."""
    contents = {"anyOf": [_schema(kind) for kind in kinds]}
    data = STRING | {"contentMediaType": JSON, "contentSchema": contents}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def _reference(kind: str, name: str) -> dict[str, str]:
    return {"$ref": COMPONENT.format(kind=kind, name=name)}


def _operation_id(method: str, template: str) -> str:
    words = [part.strip("{}") for part in template.replace(".", "_").split("/") if part]
    return "_".join([method.lower(), *words])
