"""``/openapi.json`` is true: what it allows is answered, what it forbids is refused, and nothing makes the server fail.

schemathesis makes the requests of the document, and others that break it, and checks the answers against it. It does the
same with OpenAI's own schema of these routes, where anything may be refused, but nothing may make the server fail.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from openai_document import OpenAIDocument
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from serving import Server, serving
from starlette.requests import Request

from labinfer.server.gateway.app import make_app
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.gateway.endpoints import API, PAGES
from labinfer.server.gateway.http_context import HttpContext
from labinfer.server.gateway.openapi import ITEM_SCHEMA, describe_api
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.routes import chat
from labinfer.server.gateway.routes.cluster import MAX_EVENTS_SECONDS
from labinfer.server.gateway.service import Service
from tests.refusals import refused

VOCAB_SIZE = 3072
"""Of the demo model."""
MAX_PROMPTS, MAX_TOKENS = 2, 4
LOOKING = ("/v1/cluster/events", "/v1/cluster/trace")
"""Paths whose answers take as many seconds as they are asked for."""
OPEN = ("/health", "/ready", "/ping", "/version", "/openapi.json")
"""Routes that never need a key."""
LISTS = ("prompt", "input", "text_1", "text_2", "queries", "documents")
"""Fields with several texts."""
NEEDED = {
    "/v1/responses": {"input": "red"},
    "/v1/responses/input_tokens": {"input": "red"},
    **dict.fromkeys(("/score", "/v1/score"), {"text_1": "red", "text_2": ["blue"]}),
}
"""By path, what the document leaves optional, because something else may stand for it: seldom made, and refused without."""
CONFIG = {"seed": 1, "generation": {"deterministic": True, "database": "none", "no-shrink": True}}
REASONS = (
    "(prompt is too long: )?This model.s maximum context length is [0-9]+ tokens",
    "(prompt is too long: )?the prompt has [0-9]+ tokens, but at most",
    "(prompt|input) [0-9]+ is empty",
    "min_tokens [0-9]+ is more than max_tokens",
    "best_of [0-9]+ is less than n",
    "best_of and num_beams cannot stream",
    "n [0-9]+ is more than num_beams",
    "num_beams [0-9]+ (is more than --max-num-seqs|looks at [0-9]+ tokens|may need)",
    ".* cannot be combined with num_beams",
    "stream_options needs stream: true",
    "top_logprobs needs logprobs: true",
    "prompt or messages: give exactly one",
    "tools need messages",
    "prompt: [0-9]+ outputs for each of",
    "dimensions [0-9]+ is not supported",
    "prompt_name .* is unknown",
    "truncate_prompt_tokens (must be -1, or from|[0-9]+ leaves no room)",
    "(dimensions|prompt_name|truncate_prompt_tokens) is for embeddings",
    "pooling: this model is not an embedding model",
    "model: this model has no classification head",
    "(use_activation|instruction|truncate_prompt_tokens): this model has no score head",
    "unknown logits processor",
    "logits_processors cannot be sent to the ranks",
    "ignore_eos cannot be combined with structured_outputs",
    "structured_outputs needs exactly one of",
    r"structured_outputs\.[a-z_]+ (is refused|is not valid JSON|may have|must be a JSON schema)",
    "response_format of type json_schema needs json_schema or schema",
    r"structured_outputs\.(json: a grammar cannot enforce minProperties|grammar(, line [0-9]+:| has no rule))",
    "(response_format|tools|text|output_config): the schema is refused",
    "(response_format|tools|text.format|output_config): .*unknown type",
    "max_(completion_)?tokens [0-9]+ is too large. This model.s maximum context length is [0-9]+ tokens",
    "(allowed_token_ids|bad_words)( and bad_words)? (together allow no token|allow only|forbid)",
    ".* allow no token (after [0-9]+ output tokens?|at the start of the output)",
    "response_format and structured_outputs both constrain",
    "tool_choice .*(needs tools to choose from|is not in tools|cannot be combined)",
    "tools has [0-9]+ functions called",
    "parameters of .* are nested more than",
    "logit_bias: token id [0-9]+ is outside the vocabulary",
    "echo is for completions",
    "thread: this server does not store",
    "input is empty",
    "an item of type",
    "a part of type",
    "a tool of type 'function' needs a name",
    "(input: no stored item|previous_response_id: no stored response) with id",
    "tool_choice (allows|of type)",
    "top_logprobs needs include",
    "text.format and structured_outputs both constrain",
    "only background responses can be cancelled",
    "a block of type",
    "messages: (the last message calls|a block of type)",
    "file: the form has no file",
    "max_tokens (0 has nothing to stream|must be at least 1)",
    "text_1 (and text_2, or queries and documents|has [0-9]+ texts and text_2)",
    "functions and function_call are deprecated forms",
    "continue_final_message",
    "the chat template rejects these messages",
    "this model's chat template does not support tools",
    "chat_template_kwargs",
    "the layout (-tp|tensor_parallel_size)",
    "(layers|ranks|tensor_parallel_size) [0-9,]+",
    "plan (is for another model|already determines all other fields)",
)
"""Why a request may be refused that breaks no rule a JSON schema has."""


FAR = 256
"""Largest number of items or characters that the document's bounds are tried with."""


def make_schema(document: dict, num_examples: int, coverage: str = "all"):
    """
    Args:
        num_examples: at random, of each operation.
        coverage: which of the values that the document distinguishes are tried as well: "all", those that are allowed
            ("positive"), or none ("").
    """
    generation = CONFIG["generation"] | {"max-examples": num_examples}
    values = {"enabled": bool(coverage), "generation": {"mode": coverage or "all"}}
    config = CONFIG | {"generation": generation, "phases": {"coverage": values}}
    return schemathesis.openapi.from_dict(document, config=SchemathesisConfig.from_dict(config))


def with_streams(value: Any) -> Any:
    """The document in OpenAPI 3.2, where schemathesis reads the events of streams, too."""
    if isinstance(value, list):
        return [with_streams(item) for item in value]
    if not isinstance(value, dict):
        return value
    if ITEM_SCHEMA in value:
        return {"itemSchema": value[ITEM_SCHEMA]}
    newer = {key: with_streams(item) for key, item in value.items() if not _is_far_bound(key, item)}
    return newer | {"openapi": "3.2.0"} if "openapi" in value else newer


def _is_far_bound(key: str, value: Any) -> bool:
    """Whether it is a bound that takes a long body to reach: schemathesis would send such bodies for hours. ``test_body_costs.py`` does."""
    return key in ("maxItems", "maxProperties", "maxLength") and isinstance(value, int) and value > FAR


KEYLESS = [endpoint.with_options(ServerOptions(), keys_required=False) for endpoint in API]
DOCUMENT = describe_api(KEYLESS, ["demo"], VOCAB_SIZE)
KNOWN = {
    path: set(DOCUMENT["components"]["schemas"][name]["properties"]) - {"dimensions"}
    for path, name in (
        ("/v1/chat/completions", "ChatBody"),
        ("/v1/completions", "CompletionBody"),
        ("/v1/embeddings", "EmbeddingBody"),
    )
}
OPENAI_DOCUMENT, OPENAI_KNOWN = OpenAIDocument("demo").build(), OpenAIDocument("demo", KNOWN).build()
WITH_STREAMS = with_streams(DOCUMENT)
few, many = make_schema(WITH_STREAMS, 6), make_schema(WITH_STREAMS, 500)
openai_few, openai_many = make_schema(OPENAI_DOCUMENT, 6, coverage=""), make_schema(OPENAI_DOCUMENT, 500)
known_few, known_many = make_schema(OPENAI_KNOWN, 6, coverage=""), make_schema(OPENAI_KNOWN, 500)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    args = (
        "--files-dir",
        str(tmp_path_factory.mktemp("files")),
        "--dtype",
        "float32",
        "--num-kv-blocks",
        "512",
        "--max-model-len",
        "64",
        "--request-timeout",
        "60",
    )
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


@openai_few.parametrize()
def test_nothing_that_openai_takes_makes_it_fail(server: Server, case):
    ask(server, case, negative_data_rejection)


@known_few.parametrize()
def test_nothing_that_openai_takes_in_known_fields_makes_it_fail(server: Server, case):
    ask(server, case, negative_data_rejection)


@openai_many.parametrize()
@pytest.mark.slow
def test_nothing_more_that_openai_takes_makes_it_fail(server: Server, case):
    ask(server, case, negative_data_rejection)


@known_many.parametrize()
@pytest.mark.slow
def test_nothing_more_that_openai_takes_in_known_fields_makes_it_fail(server: Server, case):
    ask(server, case, negative_data_rejection)


def check(server: Server, case) -> None:
    """What is allowed is answered, or refused for one of the ``REASONS``; all else is refused."""
    response = ask(server, case)
    # Some versions of schemathesis count a method that the document doesn't know as allowed.
    path = case.operation.path
    is_known = case.method == case.operation.method.upper() and "{id}" not in path and path != "/v1/batches"
    is_allowed = case.meta.generation.mode.is_positive and is_known
    if is_allowed and response.status_code != 200:
        message = response.json()["error"]["message"]
        assert any(re.match(reason, message) for reason in REASONS), message
        assert response.status_code == 400


def can_look(seconds) -> bool:
    """Whether a route would look at the ranks for so long, or longer."""
    try:
        return 0 <= float(seconds) <= MAX_EVENTS_SECONDS
    except (TypeError, ValueError):
        return False


def ask(server: Server, case, *unchecked):
    """The answer, which is as the document says."""
    if case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        needed = NEEDED.get(case.operation.path, {})
        case.body = body = case.body | {name: case.body.get(name) or value for name, value in needed.items()}
        for field in LISTS:  # thousands, and long answers, are no better and take longer
            if isinstance(body.get(field), list):
                body[field] = body[field][:MAX_PROMPTS]
        if case.operation.path.endswith("/completions") and not body.get("min_tokens"):
            body["max_tokens"] = body.get("max_tokens") or MAX_TOKENS
            body.pop("max_completion_tokens", None)  # which would go before it
        elif case.operation.path == "/v1/responses":
            body["max_output_tokens"] = body.get("max_output_tokens") or MAX_TOKENS
        elif case.operation.path == "/v1/cluster/layout":  # to load the model again each time takes long
            body.update(dtype=["float32"], quantization="auto")
    if case.operation.path.startswith(("/v1/cluster", "/v1/requests")):
        query = {name: "" if value == [] else value for name, value in (case.query or {}).items()}
        if case.operation.path in LOOKING and can_look(query.get("seconds", 1)):
            query["seconds"] = "0"  # not for a minute, or until this goes
        case.query = query  # in which an empty list would leave no trace
    if case.meta.generation.mode.is_positive and (case.headers or {}).get("Content-Encoding", "identity") != "identity":
        case.headers["Content-Encoding"] = "identity"  # schemathesis does not compress; ``test_gzip_is_unpacked`` does
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, excluded_checks=[positive_data_acceptance, *unchecked])
    if response.status_code >= 400:
        check_error(response, case.operation.path)
    return response


def check_error(response, path: str) -> None:
    """An error is OpenAI's object, or Anthropic's where that is spoken."""
    if response.request.method == "HEAD":
        return
    if path.startswith("/v1/messages"):
        body = response.json()
        assert (body.keys(), body["type"]) == ({"type", "error", "request_id"}, "error")
        assert {"type", "message"} <= body["error"].keys() <= {"type", "message", "details"}
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


def test_document_that_is_served_is_this_one(server: Server):
    assert server.get("/openapi.json") == (200, DOCUMENT)


def test_every_route_is_in_the_document_and_nothing_else():
    """But for the pages of a browser, and HEAD, which comes with every GET."""
    app = make_app(Service(ServerOptions(), ["demo"], AsyncLLMEngine()))
    pages = {path for endpoint in PAGES for path in (endpoint.path, *endpoint.aliases)}
    routes = {
        (method.lower(), re.sub(r":[a-z]+}", "}", route.path))
        for route in app.routes
        if route.path not in pages
        for method in route.methods - {"HEAD"}
    }
    assert {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods} == routes
    assert {("post", "/v1/score"), ("post", "/v1/rerank"), ("post", "/v2/rerank")} < routes
    assert pages == {"/", "/cluster", "/webui/{path:path}"}


def test_names_of_operations_are_unique():
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("metrics_open", [False, True])
def test_keys_are_asked_for_where_they_are_needed(metrics_open):
    options = ServerOptions(metrics_open=metrics_open)
    keyed = describe_api([endpoint.with_options(options, True) for endpoint in API], ["demo"], VOCAB_SIZE)
    for path, methods in keyed["paths"].items():
        for method, operation in methods.items():
            is_open = path in OPEN or (metrics_open and path == "/metrics")
            assert operation.get("security") == (None if is_open else [{"key": []}, {"header": []}])
            assert ("401" in operation["responses"]) != is_open
            assert "security" not in DOCUMENT["paths"][path][method]
            assert "401" not in DOCUMENT["paths"][path][method]["responses"]


def test_no_handler_reads_a_parameter_that_is_not_declared():
    """``HttpContext`` gives a handler the parameters of its endpoint only; what wrong values do is tried above."""
    for path in Path(chat.__file__).parent.glob("*.py"):
        assert "query_params" not in path.read_text(encoding="utf-8"), path
    http = Request({"type": "http", "headers": [], "query_string": b"limit=1&other=2", "client": None})
    context = HttpContext(
        Service(ServerOptions(), ["demo"], AsyncLLMEngine()), http, "", parameters=frozenset(["limit"])
    )
    assert context.known_query() == {"limit": "1"}
    with refused(400, match="unknown parameter 'other'; allowed: limit"):
        context.query()


def test_gzip_is_unpacked(server: Server):
    for encoding in ("gzip", "x-gzip"):
        packed = gzip.compress(b'{"prompt": "red"}')
        reply = server.ask("POST", "/tokenize", packed, **{"Content-Encoding": encoding})
        assert (reply.status, reply.body["count"]) == (200, 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/batches"])
def test_gzip_and_warnings_are_in_the_document(path):
    operation = DOCUMENT["paths"][path]["post"]
    assert operation["parameters"] == [
        {"name": "Content-Encoding", "in": "header", "schema": {"enum": ["", "identity", "gzip", "x-gzip"]}}
    ]
    assert {"x-request-id", "x-warning"} <= operation["responses"]["200"]["headers"].keys()
