"""Network addresses of this machine, and those that other machines can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

SIOCGIFADDR = 0x8915
"""ioctl that returns the IPv4 address of an interface (``netdevice(7)``)."""
DISCARD_PORT = 9
GLOBAL_SCOPE = "00"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def interfaces() -> dict[str, str]:
    """Interface names of this machine by address, without loopback (Linux)."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            names[socket.inet_ntoa(reply[20:24])] = name
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for address, _, _, scope, _, name in map(str.split, lines):
        if scope == GLOBAL_SCOPE:
            names[str(ipaddress.ip_address(int(address, 16)))] = name
    return {address: name for address, name in names.items() if not ipaddress.ip_address(address).is_loopback}


def bracketed(host: str) -> str:
    """Host as written before ``:port``: an IPv6 address in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host else host


def ephemeral_ports() -> range:
    """Ephemeral ports, which the system assigns to sockets without a port, such as gloo's; empty if unknown (Linux)."""
    try:
        low, high = map(int, EPHEMERAL_PORTS.read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(low, high + 1)


def source_address(peer: str) -> str:
    """Address of this machine on the route to ``peer``; empty without a route or such a host. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return ""


def addresses_towards(peers: Iterable[Sequence[str]], own: Sequence[str]) -> list[str]:
    """Own addresses from which the peers are reached, by descending number of routes; IPv4 first among equals.

    Args:
        peers: addresses of each peer. Addresses that this machine also has are skipped: container bridges have equal addresses
            everywhere.
        own: addresses of this machine.
    """
    routes = Counter(
        source
        for addresses in peers
        for source in dict.fromkeys(source_address(peer) for peer in addresses if peer not in own)
    )
    return sorted((source for source in routes if source in own), key=lambda source: (-routes[source], ":" in source))
