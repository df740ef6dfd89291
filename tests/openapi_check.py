"""Replies of a server, compared with ``/openapi.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema_rs

from labinfer.server.gateway.endpoints import API
from labinfer.server.gateway.openapi import describe_api

DOCUMENT = describe_api(API, ["demo"], vocab_size=0)
"""Document of a server with keys."""
TEMPLATES = {
    path: re.compile(re.sub(r"\{[a-z]+\}", "[^/]+", re.escape(path).replace(r"\{", "{").replace(r"\}", "}")))
    for path in DOCUMENT["paths"]
}


def check_reply(method: str, path: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Check that the document has the status, the headers and the form of the body of a reply; paths outside of it are ignored.

    Args:
        path: as requested, without its query, or as the document writes it.
    """
    template = (
        path if path in TEMPLATES else next((name for name, form in TEMPLATES.items() if form.fullmatch(path)), None)
    )
    operation = DOCUMENT["paths"].get(template, {}).get(method.lower())
    if operation is None:
        return
    place = f"{method} {template}: {status}"
    response = operation["responses"].get(str(status))
    assert response is not None, f"{place} is not in the document, which has {', '.join(operation['responses'])}"
    response = _resolve(response)
    for name in ("x-warning", "retry-after", "x-should-retry", "allow", "www-authenticate", "accept-encoding"):
        if name in {key.lower() for key in headers}:
            assert name in {key.lower() for key in response["headers"]}, f"{place} has no header {name} in the document"
    content_type = headers.get("content-type", "").partition(";")[0]
    assert content_type in response["content"], (
        f"{place} has the type {content_type}, not {', '.join(response['content'])}"
    )
    if content_type == "application/json":
        problem = next(
            iter(_validator(json.dumps(response["content"][content_type]["schema"])).iter_errors(json.loads(body))),
            None,
        )
        assert problem is None, f"{place}: {problem}"


def _resolve(part: dict[str, Any]) -> dict[str, Any]:
    return DOCUMENT["components"]["responses"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part


@lru_cache(None)
def _validator(schema: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads(schema) | {"components": DOCUMENT["components"]})
