"""Listening sockets for other machines."""

from __future__ import annotations

import socket

import pytest

from labinfer.base.config import RuntimeOptions
from labinfer.base.errors import UserError
from labinfer.comm.listening import free_port, listen
from labinfer.server.gateway.options import ServerOptions
from labinfer.server.gateway.process import listen as listen_for_clients

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")


def connect(address: str, port: int) -> None:
    socket.create_connection((address, port), timeout=5).close()


@needs_ipv6
def test_ranks_reach_it_over_ipv4_and_ipv6():
    with listen((), backlog=5) as server:
        for address in ("127.0.0.1", "::1"):
            connect(address, server.getsockname()[1])


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "addresses"), [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"]), ("127.0.0.1", ["127.0.0.1"])]
)
def test_clients_reach_the_gateway_at_its_host(host, addresses):
    with listen_for_clients(ServerOptions(host=host, port=0)) as server:
        for address in addresses:
            connect(address, server.getsockname()[1])


def test_first_free_port_of_the_range_is_taken():
    with listen((), backlog=1) as taken:
        first = taken.getsockname()[1]
        assert free_port(range(first, first + 20)) in range(first + 1, first + 20)
        with pytest.raises(
            UserError, match=rf"no port in --port-range {first}-{first} is available: Address already in"
        ):
            listen(range(first, first + 1), backlog=1)


def test_listening_goes_on_without_ipv6(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen((), backlog=1) as server:
        connect("127.0.0.1", server.getsockname()[1])


def test_range_of_ports_is_read():
    assert RuntimeOptions(port_range="29600-29602").ports == range(29600, 29603)
    assert not RuntimeOptions().ports


@pytest.mark.parametrize("text", ["29600", "29600-", "-29600", "2-1", "0-5", "1-65536", "a-b", "1-2-3", "²-3", " 1-2"])
def test_what_is_no_range_of_ports_is_refused(text):
    with pytest.raises(UserError, match="give LOW-HIGH with ports"):
        RuntimeOptions(port_range=text).ports  # noqa: B018
