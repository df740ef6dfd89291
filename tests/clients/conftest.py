"""The server that a suite asks: one that runs already, or one for this suite alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_service import client_service


def pytest_addoption(parser):
    parser.addoption("--server", default="", help="URL of a running client_service, instead of one of its own")


@pytest.fixture(scope="session")
def url(request) -> Iterator[str]:
    """The server's address, without ``/v1``."""
    if given := request.config.getoption("--server", ""):
        yield given
        return
    with client_service() as server:
        yield server.url
