"""Cluster: machines, their measured costs, and the links between them; read from files and flags."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.planner.costs import HostCosts

UNITS = {"bit": 1 / 8, "kbit": 125, "mbit": 125e3, "gbit": 125e6}
"""Bytes per second of each rate unit of --link."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
RATE = re.compile(rf"([0-9.]+)({'|'.join(UNITS)})", re.IGNORECASE)
LATENCY = re.compile(rf"([0-9.]+)({'|'.join(SECONDS)})", re.IGNORECASE)
HINT = "give --link a:b=1gbit,0.3ms, or --link 1gbit,0.3ms for all pairs"


class NetworkLink(msgspec.Struct, frozen=True):
    """Symmetric network link between two machines."""

    latency: float
    """Seconds that an empty message takes in one direction."""
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Seconds that a message of ``num_bytes`` takes in one direction."""
        return self.latency + num_bytes / self.bytes_per_second


class MachinePairLink(msgspec.Struct, frozen=True, kw_only=True):
    """The network link between the machines named ``a`` and ``b``."""

    a: str
    b: str
    link: NetworkLink


OWN_LINK = NetworkLink(0.0, float("inf"))
"""Default link of a machine to itself: transfers between its own stages take no time."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, or ``count`` equal machines."""

    name: str
    costs: list[HostCosts]
    """One measurement for each tp_size, dtype and quantization."""
    num_ranks: int = 0
    """Ranks on the machine; 0 for the largest tp_size in ``costs``."""
    count: int = 1
    """Number of equal machines; above 1 their names are ``name-0``, ``name-1``, …"""
    block_size: int = 0
    """Tokens per KV block that the devices of the machine prefer; 0 if unknown."""

    @property
    def ranks(self) -> int:
        return self.num_ranks or max(costs.tp_size for costs in self.costs)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Machines and their links."""

    machines: list[Machine]
    links: list[MachinePairLink] = []
    """Links of pairs of machines; of two links of one pair the later one counts."""
    default_link: NetworkLink | None = None
    """Link of all pairs that are not in ``links``."""

    @classmethod
    def read(cls, paths: Sequence[str], links: Sequence[str] = ()) -> Cluster:
        """A cluster from files of ``launch.py probe --save`` and values of ``--link``. Several files may describe one machine, probed
        with different options.

        Raises:
            UserError: a file cannot be read or does not hold a cluster, or a link is malformed.
        """
        parts = [_read_file(path) for path in paths]
        default = next((part.default_link for part in reversed(parts) if part.default_link), None)
        pairs = [pair for part in parts for pair in part.links]
        for text in links:
            names, link = parse_link(text)
            if names is None:
                default = link
            else:
                pairs.append(MachinePairLink(a=names[0], b=names[1], link=link))
        machines = _merge([machine for part in parts for machine in part.machines])
        cluster = cls(machines=machines, links=pairs, default_link=default).expand()
        cluster.check()
        return cluster

    def expand(self) -> Cluster:
        """Copy of this cluster in which ``count`` equal machines are ``count`` entries.

        Raises:
            UserError: a ``count`` is below 1.
        """
        machines = []
        for machine in self.machines:
            if machine.count < 1:
                raise UserError(
                    f"machine {machine.name} has a count of {machine.count}; give at least 1, or leave it out"
                )
            if machine.count == 1:
                machines.append(machine)
                continue
            for number in range(machine.count):
                machines.append(msgspec.structs.replace(machine, name=f"{machine.name}-{number}", count=1))
        return msgspec.structs.replace(self, machines=machines)

    def with_block_size(self, options: EngineOptions) -> EngineOptions:
        """Copy of ``options`` with the block size that a launch on all machines would take: ``--block-size`` if given, else the
        largest that a machine prefers."""
        if options.cache.block_size:
            return options
        size = max((machine.block_size for machine in self.machines), default=0)
        return dataclasses.replace(options, cache=dataclasses.replace(options.cache, block_size=size))

    def link(self, a: str, b: str) -> NetworkLink:
        """The link of two machines.

        Raises:
            UserError: they have no link.
        """
        for pair in reversed(self.links):
            if {pair.a, pair.b} == {a, b}:
                return pair.link
        if a == b:
            return OWN_LINK
        if self.default_link is None:
            raise UserError(f"no link between {a} and {b} is known; {HINT}")
        return self.default_link

    def link_table(self) -> dict[tuple[str, str], NetworkLink]:
        """Links of all pairs of machines, in both directions.

        Raises:
            UserError: two machines have no link.
        """
        given = {frozenset((pair.a, pair.b)): pair.link for pair in self.links}
        names = [machine.name for machine in self.machines]
        return {(a, b): given.get(frozenset((a, b))) or self.link(a, b) for a in names for b in names}

    def check(self) -> None:
        """Check an expanded cluster that was read from files and flags.

        Raises:
            UserError: there is no machine, a name is empty or not unique, a cost or link is invalid, missing or of an unknown machine, or
                the machines were measured with different models.
        """
        if not self.machines:
            raise UserError("the cluster has no machines; give files written by launch.py probe --save")
        names = [machine.name for machine in self.machines]
        for machine in self.machines:
            self._check_machine(machine, names)
        everything = [(machine.name, costs) for machine in self.machines for costs in machine.costs]
        first, expected = everything[0]
        for name, costs in everything:
            if (costs.model, costs.layers) != (expected.model, expected.layers):
                raise UserError(
                    f"{first} and {name} were measured with different models; probe them with the same --model"
                )
        for pair in self.links:
            if unknown := {pair.a, pair.b} - set(names):
                raise UserError(f"link {pair.a}:{pair.b} names {min(unknown)}, but machines are {', '.join(names)}")
            check_link(pair.link, f"{pair.a}:{pair.b}")
        if self.default_link is not None:
            check_link(self.default_link, "of all pairs")
        self.link_table()

    @staticmethod
    def _check_machine(machine: Machine, names: Sequence[str]) -> None:
        if not machine.name:
            raise UserError("a machine of the cluster has no name; give each machine a unique name")
        if names.count(machine.name) > 1:
            raise UserError(f"machine {machine.name!r} occurs twice in the cluster; give each machine a unique name")
        if machine.num_ranks < 0:
            raise UserError(
                f"machine {machine.name} has {machine.num_ranks} ranks; give at least 1, or 0 to use its largest "
                "tp_size"
            )
        if machine.block_size < 0:
            raise UserError(
                f"machine {machine.name} has a block_size of {machine.block_size} tokens; give at least 1, or 0 if unknown"
            )
        if not machine.costs:
            raise UserError(f"machine {machine.name} has no costs; probe it")
        for costs in machine.costs:
            costs.check()
            if costs.tp_size > machine.ranks:
                raise UserError(f"machine {machine.name} has costs for tp {costs.tp_size}, but {machine.ranks} ranks")


def parse_link(text: str) -> tuple[tuple[str, str] | None, NetworkLink]:
    """Pair of machines and link of a --link value such as ``a:b=1gbit,0.3ms``; the pair is None for ``1gbit,0.3ms`` (all pairs).

    Raises:
        UserError: ``text`` is malformed.
    """
    names, _, values = text.rpartition("=")
    rate, _, latency = values.partition(",")
    rate_match, latency_match = RATE.fullmatch(rate.strip()), LATENCY.fullmatch(latency.strip())
    pair = names.split(":")
    if rate_match is None or latency_match is None or (names and (len(pair) != 2 or not all(pair))):
        raise UserError(f"--link {text} is not understood; {HINT}")
    try:
        bytes_per_second = float(rate_match[1]) * UNITS[rate_match[2].lower()]
        link = NetworkLink(float(latency_match[1]) * SECONDS[latency_match[2].lower()], bytes_per_second)
    except ValueError:
        raise UserError(f"--link {text} is not understood; {HINT}") from None
    check_link(link, text)
    return ((pair[0], pair[1]) if names else None), link


def check_link(link: NetworkLink, name: str) -> None:
    """Check the rate and the latency of ``link``.

    Raises:
        UserError: the rate is not positive or is infinite, or the latency is negative or infinite. The message calls
            the link ``name``.
    """
    if not 0 <= link.latency < math.inf or not 0 < link.bytes_per_second < math.inf:
        raise UserError(
            f"link {name} has {link.latency:g} s and {link.bytes_per_second:g} bytes/s; give a latency of at least "
            "0 and a rate above 0"
        )


def _merge(machines: Sequence[Machine]) -> list[Machine]:
    """Merge several entries for one machine into one entry with all their costs (dtypes, quantizations, tensor-parallel degrees).

    Raises:
        UserError: two probes have equal dtype, quantization and degree, or different numbers of ranks.
    """
    by_name: dict[str, Machine] = {}
    for machine in machines:
        first = by_name.setdefault(machine.name, machine)
        if first is machine:
            continue
        if both := _forms(first) & _forms(machine):
            dtype, quantization, tp_size = min(both)
            raise UserError(
                f"machine {machine.name!r} occurs twice in the cluster in {dtype} ({quantization}) with tp "
                f"{tp_size}; give each machine a unique name, or leave a file out"
            )
        if (first.num_ranks, first.count) != (machine.num_ranks, machine.count):
            raise UserError(
                f"machine {machine.name!r} was probed with {first.num_ranks} ranks and with {machine.num_ranks}; "
                "probe it with the same number of ranks each time"
            )
        size = max(first.block_size, machine.block_size)
        by_name[machine.name] = msgspec.structs.replace(first, costs=first.costs + machine.costs, block_size=size)
    return list(by_name.values())


def _forms(machine: Machine) -> set[tuple[str, str, int]]:
    """Dtype, quantization and tensor-parallel degree of each cost of ``machine``."""
    return {(costs.dtype, costs.quantization, costs.tp_size) for costs in machine.costs}


def _read_file(path: str) -> Cluster:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Cluster)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; create it with launch.py probe --save") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a cluster file: {error}; create it with launch.py probe --save") from None
