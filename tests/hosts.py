"""Hosts with names and addresses of their own, joined by cables: network namespaces on this machine (Linux, root)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from launchers import BIN, LAUNCH, start

DEVICE = "lab0"
RSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
number=$((${1##*[.:]} - 1)); shift
[ -e DIRECTORY/off-$number ] && exec sleep 300
exec ip netns exec NAME$number unshare --uts --mount sh -c "mount --bind DIRECTORY/hosts /etc/hosts; hostname host-$number; $*"
"""
"""Like ssh, between these hosts. One that is switched off answers nothing."""


def may_make_hosts() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    probe = f"labinfer-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return made


needs_hosts = pytest.mark.skipif(not may_make_hosts(), reason="needs root, ip and unshare to make hosts")


class Hosts:
    """Some hosts, of which the first one is the switch as well. They do not know each other's names, and have no default
    route: what is left are the cables between them.

    Args:
        directory: for what belongs to the hosts.
        ipv6: whether the hosts have IPv6 addresses, and none of IPv4.
    """

    def __init__(self, count: int, directory: Path, *, ipv6: bool = False):
        self._directory, self._name = directory, f"labinfer{os.getpid()}-"
        self.addresses = [f"fd99:7::{number + 1}" if ipv6 else f"10.99.7.{number + 1}" for number in range(count)]
        (directory / "hosts").write_text("127.0.0.1 localhost\n")
        self.rsh = directory / "rsh"
        self.rsh.write_text(RSH.replace("DIRECTORY", str(directory)).replace("NAME", self._name))
        self.rsh.chmod(0o755)

    @classmethod
    @contextmanager
    def made(cls, count: int, directory: Path, *, ipv6: bool = False) -> Iterator[Hosts]:
        hosts = cls(count, directory, ipv6=ipv6)
        try:
            hosts._join()
            yield hosts
        finally:
            for number in range(count):
                subprocess.run(["ip", "netns", "del", hosts.namespace(number)], capture_output=True)

    def _join(self) -> None:
        for number, address in enumerate(self.addresses):
            name = self.namespace(number)
            _ip("netns", "add", name)
            if number == 0:
                _ip("-n", name, "link", "add", DEVICE, "type", "bridge")
            else:
                ends = (
                    f"port{number}",
                    "netns",
                    self.namespace(0),
                    "type",
                    "veth",
                    "peer",
                    "name",
                    DEVICE,
                    "netns",
                    name,
                )
                _ip("link", "add", *ends)
                _ip("-n", self.namespace(0), "link", "set", f"port{number}", "master", DEVICE, "up")
            mask = ["/64", "nodad"] if ":" in address else ["/24"]
            _ip("-n", name, "addr", "add", address + mask[0], "dev", DEVICE, *mask[1:])
            for device in ("lo", DEVICE):
                _ip("-n", name, "link", "set", device, "up")

    def namespace(self, number: int) -> str:
        return f"{self._name}{number}"

    def cable(self, number: int, state: str) -> None:
        """Pull a host's cable (``down``), or put it back (``up``)."""
        _ip("-n", self.namespace(number), "link", "set", DEVICE, state)

    def drop(self, number: int, ports: str) -> None:
        """Have a host's firewall drop what comes over the cable for these TCP ports, ``LOW-HIGH``."""
        self._add_rules(number, ["dport", ports, "blackhole"])

    def let_through(self, number: int, ports: str) -> None:
        """Have a host's firewall drop all of TCP that comes over the cable, but for these ports, and answers from them."""
        self._add_rules(number, ["dport", ports, "lookup", "local"], ["sport", ports, "lookup", "local"], ["blackhole"])

    def _add_rules(self, number: int, *rules: list[str]) -> None:
        """Routing rules in the place of a firewall, which few machines have the tools for."""
        rule = ["-n", self.namespace(number), "rule"]
        for place, each in enumerate(rules, start=1):
            _ip(*rule, "add", "pref", str(place), "iif", DEVICE, "ipproto", "tcp", *each)
        _ip(*rule, "add", "pref", "10", "lookup", "local")  # behind those above: it stands before all by default
        _ip(*rule, "del", "pref", "0")

    def switch_off(self, number: int) -> None:
        """Kill all that runs on a host, and have it take no more."""
        (self._directory / f"off-{number}").touch()
        self.cable(number, "down")
        pids = subprocess.run(["ip", "netns", "pids", self.namespace(number)], capture_output=True, text=True).stdout
        subprocess.run(["kill", "-9", *pids.split()], capture_output=True)

    def start(self, number: int, command: list[str]) -> subprocess.Popen:
        """A process on a host that knows its own name."""
        shell = f'mount --bind {self._directory}/hosts /etc/hosts && hostname host-{number} && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", shell, "sh", *map(str, command)]
        return start(["ip", "netns", "exec", self.namespace(number), *inside])

    def torchrun(
        self, ranks_each: int, *flags: str, max_restarts: int = 0, numbers: Sequence[int] = ()
    ) -> list[subprocess.Popen]:
        """An agent on each host, or on those with these numbers."""
        count, first = len(self.addresses), self.addresses[0]
        agent = [str(BIN / "torchrun"), f"--nnodes={count}", f"--nproc-per-node={ranks_each}"]
        agent += [f"--master-addr={first}", "--master-port=29517", f"--max-restarts={max_restarts}"]
        numbers = numbers or range(count)
        return [self.start(number, [*agent, f"--node-rank={number}", LAUNCH, *flags]) for number in numbers]

    def mpirun(self, ranks_each: int) -> list[str]:
        """The beginning of a command for the first host, which starts ranks on all."""
        reach = ["-launcher", "ssh", "-launcher-exec", str(self.rsh), "-localhost", self.addresses[0]]
        where = ["-hosts", ",".join(self.addresses), "-ppn", str(ranks_each)]
        return [str(BIN / "mpirun"), *reach, *where, "-n", str(ranks_each * len(self.addresses))]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
