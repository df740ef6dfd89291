"""A server for the suites of OpenAI's client; other modules have servers of their own."""

from __future__ import annotations

import openai
import pytest
from serving import Server, serving


@pytest.fixture(scope="session")
def server():
    with serving("--dtype", "float32", "--num-kv-blocks", "1024", "--max-body-size", "1") as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    )


@pytest.fixture(scope="session")
def lenient(server: Server) -> openai.OpenAI:
    """For what OpenAI's API says and its client's own types have no place for: base64, and the null of a first token."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
