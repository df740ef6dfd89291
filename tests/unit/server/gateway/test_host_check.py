"""Names by which a server may be reached, and pages that may change something."""

from __future__ import annotations

import socket

import pytest

from labinfer.requests.openai.api_errors import ApiError
from labinfer.server.gateway.host_check import AllowedHosts

HERE = ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost:80", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", ""]


def status(allowed: AllowedHosts, hosts: list[str], origin: str | None = None, method: str = "POST") -> int:
    try:
        allowed.check(method, hosts, origin)
    except ApiError as error:
        assert "--allowed-hosts" in error.message
        return error.status
    return 200


@pytest.mark.parametrize("host", [*HERE, socket.gethostname(), f"{socket.gethostname().upper()}:8000"])
def test_own_names_and_all_addresses_are_allowed(host):
    assert status(AllowedHosts((), "127.0.0.1"), [host]) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evillocalhost", "127.0.0.1.nip.io", "[", "a b"]
)
def test_other_names_are_refused_until_they_are_given(host):
    assert status(AllowedHosts((), "0.0.0.0"), [host]) == 421
    assert status(AllowedHosts((), "0.0.0.0"), ["localhost", host]) == 421
    assert status(AllowedHosts(("*",), "0.0.0.0"), [host]) == 200


def test_given_names_are_allowed_with_any_port():
    allowed = AllowedHosts(("Models.Lab.example", "other"), "0.0.0.0")
    assert [status(allowed, [host]) for host in ("models.lab.example:443", "OTHER", "lab.example")] == [200, 200, 421]


def test_name_that_is_listened_on_is_allowed():
    assert status(AllowedHosts((), "node7.cluster"), ["node7.cluster:8000"]) == 200


def test_request_without_a_name_is_of_no_browser():
    assert status(AllowedHosts((), "127.0.0.1"), []) == 200


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:8000", None, 200),
        ("localhost:8000", "http://localhost:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "http://evil.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "", 403),
        ("127.0.0.1:8000", "https://models.example", 200),  # behind a proxy
    ],
)
def test_only_own_pages_change_something(host, origin, expected):
    allowed = AllowedHosts(("models.example",), "127.0.0.1")
    assert status(allowed, [host], origin) == expected
    assert status(allowed, [host], origin, "GET") == 200


def test_any_name_is_not_any_page():
    assert status(AllowedHosts(("*",), "127.0.0.1"), ["a.example"], "http://b.example") == 403
    assert status(AllowedHosts(("*",), "127.0.0.1"), ["a.example"], "http://a.example") == 200
