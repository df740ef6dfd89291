"""``/openapi.json`` is true: what it allows is answered, what it forbids is refused, and nothing makes the server fail.

schemathesis makes the requests of the document, and others that break it, and checks the answers against it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance
from serving import Server, serving

from labinfer.server.app import ENDPOINTS
from labinfer.server.openapi import describe_api

VOCAB_SIZE = 3072
"""Of the demo model."""
MAX_PROMPTS = 2
CONFIG = {"seed": 1, "generation": {"deterministic": True, "database": "none", "no-shrink": True}}
REASONS = (
    "the prompt has [0-9]+ tokens, but at most",
    "(prompt|input) [0-9]+ is empty",
    "min_tokens [0-9]+ is more than max_tokens",
    "best_of [0-9]+ is less than n",
    "best_of and num_beams cannot stream",
    "n [0-9]+ is more than num_beams",
    "num_beams [0-9]+ (is more than --max-num-seqs|looks at [0-9]+ tokens|may need)",
    ".* does not go with num_beams",
    "stream_options goes with stream: true",
    "top_logprobs needs logprobs: true",
    "prompt or messages: give one of the two",
    "tools go with messages",
    "prompt: [0-9]+ answers to each of",
    "dimensions [0-9]+ are not offered",
    "there is no logits processor",
    "ignore_eos does not go with structured_outputs",
    "structured_outputs needs exactly one of",
    r"structured_outputs\.[a-z_]+ (is refused|is not valid JSON|may have|must be a JSON schema)",
    "response_format and structured_outputs both say",
    "tool_choice .*(needs tools to choose from|is not among tools|another form)",
    "tools has [0-9]+ functions called",
    "parameters of .* are nested more than",
    "logit_bias: token id [0-9]+ is outside the vocabulary",
    "echo is for completions",
    "the chat template refuses these messages",
    "this model's chat template has no place for tools",
)
"""Why a request may be refused that breaks no rule a JSON schema has."""


def make_schema(document: dict, num_examples: int):
    generation = CONFIG["generation"] | {"max-examples": num_examples}
    return schemathesis.openapi.from_dict(
        document, config=SchemathesisConfig.from_dict(CONFIG | {"generation": generation})
    )


DOCUMENT = describe_api(["demo"], VOCAB_SIZE, needs_key=False)
few, many = make_schema(DOCUMENT, 40), make_schema(DOCUMENT, 2000)


@pytest.fixture(scope="module")
def server():
    args = ("--dtype", "float32", "--num-kv-blocks", "512", "--max-model-len", "64", "--request-timeout", "60")
    with serving(*args) as server:
        yield server
        server.wait_idle()
        assert "Traceback" not in server.text


@few.parametrize()
def test_what_the_document_says_is_so(server: Server, case):
    check(server, case)


@many.parametrize()
@pytest.mark.slow
def test_what_the_document_says_is_so_of_many_more(server: Server, case):
    check(server, case)


def check(server: Server, case) -> None:
    is_allowed = case.meta.generation.mode.is_positive and case.operation.path != "/v1/requests/{id}/cancel"
    if is_allowed and isinstance(case.body, dict):
        case.body = whole(case.body)
        for field in ("prompt", "input"):
            if isinstance(case.body.get(field), list):
                case.body[field] = case.body[field][:MAX_PROMPTS]  # thousands are as good, and take longer
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    if response.status_code >= 400:
        check_error(response)
    if is_allowed and response.status_code != 200:
        message = response.json()["error"]["message"]
        assert any(re.match(reason, message) for reason in REASONS), message
        assert response.status_code == 400


def whole(value: Any) -> Any:
    """With 1 for 1.0, which is a whole number to a JSON schema, and nothing else could say that it is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(part) for part in value]
    return {key: whole(part) for key, part in value.items()} if isinstance(value, dict) else value


def check_error(response) -> None:
    """An error is OpenAI's object."""
    if response.request.method == "HEAD":
        return
    assert response.headers["content-type"] == ["application/json"]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    assert isinstance(error["param"], (str, type(None)))
    assert isinstance(error["code"], (str, type(None)))


def test_the_document_that_is_served_is_this_one(server: Server):
    assert server.get("/openapi.json") == (200, DOCUMENT)


def test_every_endpoint_is_in_the_document_and_nothing_else():
    routes = {(endpoint.method.lower(), re.sub(r":[a-z]+}", "}", endpoint.path)) for endpoint in ENDPOINTS}
    assert {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods} == routes


def test_keys_are_asked_for_where_they_are_needed():
    keyed = describe_api(["demo"], VOCAB_SIZE, needs_key=True)
    for endpoint in ENDPOINTS:
        path = re.sub(r":[a-z]+}", "}", endpoint.path)
        wanted = [{"key": []}] if endpoint.needs_key else None
        assert keyed["paths"][path][endpoint.method.lower()].get("security") == wanted
        assert "security" not in DOCUMENT["paths"][path][endpoint.method.lower()]
        assert ("401" in DOCUMENT["paths"][path][endpoint.method.lower()]["responses"]) == endpoint.needs_key
