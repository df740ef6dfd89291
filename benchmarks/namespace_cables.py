"""Cables between hosts that are network namespaces: veth pairs with a rate, or a relay between TUN devices with a delay as well."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

DEVICE, NETWORK = "lab0", "10.99.8"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
CLONE_NEWNET = 0x40000000
DESTINATION = slice(16, 20)
"""Bytes of the receiver's address in a packet of IPv4."""


def address(number: int) -> str:
    return f"{NETWORK}.{number + 1}"


@contextmanager
def join_hosts(name: str, delays: Sequence[float], *, mbit: float) -> Iterator[None]:
    """Hosts ``name0``, ``name1``, …, each with one device; they end with the context.

    Args:
        delays: seconds between each host and the middle of the network; where all are 0 it is made of the kernel's cables.
        mbit: rate of each host's device, out of it.
    """
    namespaces, relay = [f"{name}{number}" for number in range(len(delays))], None
    switch = f"{name}switch"
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        if any(delays):
            command = [sys.executable, __file__, ",".join(map(str, delays)), str(mbit), *namespaces]
            relay = subprocess.Popen(command, stdout=subprocess.PIPE)
            relay.stdout.readline()  # devices are there
        else:
            _lay_cables(switch, namespaces, mbit)
        for number, namespace in enumerate(namespaces):
            _ip("-n", namespace, "addr", "add", f"{address(number)}/24", "dev", DEVICE)
            _ip("-n", namespace, "link", "set", DEVICE, "up")
        yield
    finally:
        if relay is not None:
            relay.kill()
            relay.wait()
        for namespace in (*namespaces, switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _lay_cables(switch: str, namespaces: list[str], mbit: float) -> None:
    """A cable from each host to a bridge in a namespace of its own; every end sends at this rate."""
    _ip("netns", "add", switch)
    _ip(*f"-n {switch} link add {DEVICE} type bridge".split())
    _ip(*f"-n {switch} link set {DEVICE} up".split())
    for number, namespace in enumerate(namespaces):
        port = f"port{number}"
        _ip(*f"link add {port} netns {switch} type veth peer name {DEVICE} netns {namespace}".split())
        _ip("-n", switch, "link", "set", port, "master", DEVICE, "up")
        for place, device in ((switch, port), (namespace, DEVICE)):
            shape = f"qdisc add dev {device} root tbf rate {mbit}mbit burst 256kb latency 100ms"
            subprocess.run(["tc", "-n", place, *shape.split()], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def relay_packets(delays: list[float], mbit: float, namespaces: list[str]) -> None:
    """Hand every packet to the host that its address names, after both hosts' delays and when those before it are through."""
    devices = [_open_tun(namespace) for namespace in namespaces]
    receivers = {bytes(int(part) for part in address(number).split(".")): fd for number, fd in enumerate(devices)}
    print("up", flush=True)
    seconds = dict(zip(devices, delays, strict=True))
    rate, free_at, number = mbit * 1e6 / 8, dict.fromkeys(devices, 0.0), 0
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd in select.select(devices, [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(fd, 65536)
                    if packet[DESTINATION] not in receivers:  # such as a multicast, or IPv6
                        continue
                    free_at[fd] = max(free_at[fd], time.monotonic()) + len(packet) / rate
                    number += 1
                    receiver = receivers[packet[DESTINATION]]
                    due = free_at[fd] + seconds[fd] + seconds[receiver]
                    heapq.heappush(waiting, (due, number, receiver, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            *_, receiver, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a queue that is full drops packets, as a switch does
                os.write(receiver, packet)


def enter_network(namespace: str) -> None:
    """Be on the network of a namespace from here on: this thread, and the threads and processes that it starts."""
    _enter(os.open(f"/run/netns/{namespace}", os.O_RDONLY), namespace)


def _enter(place: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(place, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"no way into {name}")
    os.close(place)


def _open_tun(namespace: str) -> int:
    """A TUN device in a namespace, as a file here."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter_network(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    _enter(own, "the network of before")
    subprocess.run(["ip", "-n", namespace, "link", "set", DEVICE, "mtu", "9000"], check=True)
    return fd


if __name__ == "__main__":
    relay_packets([float(text) for text in sys.argv[1].split(",")], float(sys.argv[2]), sys.argv[3:])
