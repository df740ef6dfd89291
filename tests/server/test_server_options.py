"""Options of the server that clients notice, asked of the application itself: no engine is needed."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx
import pytest

from labinfer.base.errors import UserError
from labinfer.server.gateway.app import make_app
from labinfer.server.gateway.async_llm_engine import AsyncLLMEngine
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.service import Service

SITE, KEY = "https://chat.example", "sk-0123456789"
LOADING = 503
"""Status of requests that are right: there is no model."""


def ask(method: str, path: str, body: bytes | dict | None = None, *, headers: dict | None = None, **options):
    """The answer of a server with these options."""

    async def run() -> httpx.Response:
        service = Service(ServerOptions(**options), ["demo"], AsyncLLMEngine())
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(service)), base_url="http://localhost"
        ) as client:
            content = json.dumps(body).encode() if isinstance(body, dict) else body
            head = {"content-type": "application/json"} | (headers or {})
            return await client.request(method, path, content=content, headers=head)

    return asyncio.run(run())


# Pages of other sites.


@pytest.mark.parametrize("allowed", [(SITE,), ("*",), ("https://other.example", SITE.upper())])
def test_page_of_an_allowed_site_may_use_the_api(allowed):
    reply = ask("POST", "/detokenize", {"tokens": []}, headers={"Origin": SITE}, allowed_origins=allowed)
    assert reply.status_code == LOADING
    assert reply.headers["access-control-allow-origin"] in (SITE, "*")
    assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()


def test_preflight_of_an_allowed_site_is_answered():
    asked = {
        "Origin": SITE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    reply = ask("OPTIONS", "/v1/chat/completions", headers=asked, allowed_origins=(SITE,), api_key=(KEY,))
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == SITE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
    assert ask("OPTIONS", "/v1/chat/completions", headers=asked, allowed_origins=("https://a.b",)).status_code == 400
    assert ask("OPTIONS", "/v1/chat/completions", headers=asked).status_code == 405


def test_page_of_another_site_is_refused():
    for allowed in ((), ("https://a.b",), (f"{SITE}:444",), ("http://chat.example",)):
        reply = ask("POST", "/detokenize", {"tokens": []}, headers={"Origin": SITE}, allowed_origins=allowed)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "--allowed-origins" in reply.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "ftp://a", "https://", "null"])
def test_site_that_is_none_is_refused_at_the_start(origin):
    with pytest.raises(UserError, match="--allowed-origins"):
        ServerOptions(allowed_origins=(origin,))


# Keys.


def test_metrics_are_open_where_that_is_asked_for():
    for is_open in (False, True):
        reply = ask("GET", "/metrics", api_key=(KEY,), metrics_open=is_open)
        assert reply.status_code == (200 if is_open else 401)
        assert ask("GET", "/load", api_key=(KEY,), metrics_open=is_open).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_short_key_is_enough_on_loopback(host):
    headers = {"Authorization": "Bearer x"}
    assert ask("GET", "/v1/models", host=host, api_key=("x",), headers=headers).status_code == 200
    assert ask("GET", "/v1/models", host=host, api_key=("y",), headers=headers).status_code == 401
    with pytest.raises(UserError, match="has 1 characters"):
        ask("GET", "/v1/models", host="0.0.0.0", api_key=("x",))
    with pytest.raises(UserError, match="has 0 characters"):
        ask("GET", "/v1/models", host=host, api_key=("",))


# Bodies.


def test_unknown_fields_are_left_out_where_that_is_asked_for():
    body = {"tokens": [1], "nonsense": 1, "naïve\n": 2}
    assert ask("POST", "/detokenize", body).status_code == 400
    reply = ask("POST", "/detokenize", body, ignore_unknown_fields=True)
    assert reply.status_code == LOADING
    assert reply.headers["x-warning"] == "unknown fields were ignored: nonsense, na\\xefve "
    assert "x-warning" not in ask("POST", "/detokenize", {"tokens": [1]}, ignore_unknown_fields=True).headers


def test_unknown_field_names_the_one_that_was_meant():
    error = ask("POST", "/v1/completions", {"prompt": "a", "max_token": 1}).json()["error"]
    assert error["param"] == "max_token" and error["message"].endswith("did you mean 'max_tokens'?")


BODY = json.dumps({"tokens": [1] * 1000}).encode()
GZIP = {"Content-Encoding": "gzip"}


def test_body_may_begin_with_a_byte_order_mark():
    assert ask("POST", "/detokenize", b"\xef\xbb\xbf" + BODY).status_code == LOADING


def test_body_may_be_packed():
    for name in ("gzip", "GZIP", "x-gzip"):
        packed = ask("POST", "/detokenize", gzip.compress(BODY), headers={"Content-Encoding": name})
        assert packed.status_code == LOADING
    assert ask("POST", "/detokenize", BODY, headers={"Content-Encoding": "identity"}).status_code == LOADING


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (BODY, "not valid gzip"),
        (gzip.compress(BODY)[:-9], "ends before its gzip data does"),
        (gzip.compress(BODY) * 2, "more than one gzip member"),
        (b"", "ends before its gzip data does"),
    ],
)
def test_packed_body_that_is_broken_is_refused(body, says):
    reply = ask("POST", "/detokenize", body, headers=GZIP)
    assert reply.status_code == 400 and says in reply.json()["error"]["message"]


def test_packed_body_is_bounded_by_what_it_unpacks_to():
    bomb = gzip.compress(b" " * (64 << 20))
    reply = ask("POST", "/detokenize", bomb, headers=GZIP, max_body_size=1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


def test_body_that_is_packed_in_another_way_is_refused():
    for name in ("br", "deflate", "gzip, gzip", "\xff"):
        reply = ask("POST", "/detokenize", BODY, headers={"Content-Encoding": name.encode("latin-1")})
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_content_encoding")
        assert reply.headers["accept-encoding"] == "gzip"


# Routes of vLLM's.


def test_ping_and_load():
    for method in ("GET", "POST"):
        assert ask(method, "/ping", api_key=(KEY,)).status_code == 200
    assert ask("GET", "/load").json() == {"server_load": 0}


def test_document_is_of_openapi_3_1():
    document = ask("GET", "/openapi.json").json()
    assert document["openapi"].startswith("3.1.")
    assert document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank", "/v2/rerank"])
def test_other_names_of_routes_lead_there_too(path):
    assert ask("POST", path, {"nonsense": 1}).status_code == 400
