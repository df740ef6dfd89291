"""Unit: one of the equal places where a stage may run; how the machines of a cluster make up such classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from labinfer.errors import UserError
from labinfer.planner.cluster import Cluster, Link, Machine
from labinfer.planner.costs import HostCosts

MAX_STATES = 20_000
"""Sets of units that are looked through for each choice of tp_sizes."""
MAX_CHOICES = 256
"""Ways to choose a tp_size for each kind of machine that are looked through."""


@dataclass(frozen=True)
class UnitClass:
    """Units with the same costs and the same links to all others."""

    machines: tuple[str, ...]
    """Machine of each unit."""
    costs: HostCosts

    @property
    def count(self) -> int:
        return len(self.machines)

    def link(self, other: UnitClass, links: Mapping[tuple[str, str], Link]) -> Link:
        """Link between a unit of this class and one of another, or between two of its own."""
        return links[self.machines[0], other.machines[-1]]


@dataclass(frozen=True)
class UnitChoices:
    """The ways to make units of a cluster's machines: one for each choice of a tp_size on each kind of machine."""

    choices: list[list[UnitClass]]
    num_left_out: int = 0
    """Choices that are not among them: they are more than ``MAX_CHOICES``, or make more than ``MAX_STATES`` sets."""


def choose_units(cluster: Cluster, dtypes: Sequence[tuple[str, str]] = ()) -> UnitChoices:
    """All choices, or as many as are looked through; those with the largest tp_sizes, and so the fewest units, first.

    Args:
        dtypes: pairs of dtype and quantization that are allowed, the first that a machine has is taken; empty for any.

    Raises:
        UserError: even the fewest units are too many, and too unlike, to look through all sets of them.
    """
    groups = _group_machines(cluster)
    options = [allowed_costs(machines[0], dtypes) or [None] for machines in groups]
    total = math.prod(len(costs) for costs in options)
    choices, sizes = [], []
    for choice in itertools.islice(itertools.product(*options), MAX_CHOICES):
        classes: list[UnitClass] = []
        for machines, costs in zip(groups, choice, strict=True):
            if costs is None:
                continue
            units = machines[0].ranks // costs.tp_size
            if units == 1:
                classes.append(UnitClass(tuple(machine.name for machine in machines), costs))
            else:  # units of a machine are nearer to each other than to those of the next
                classes += [UnitClass((machine.name,) * units, costs) for machine in machines]
        if not classes:  # no machine has a dtype that is allowed
            return UnitChoices([])
        sizes.append(math.prod(each.count + 1 for each in classes))
        if sizes[-1] <= MAX_STATES:
            choices.append(classes)
    if sizes and not choices:
        raise UserError(
            f"{len(cluster.machines)} machines make {min(sizes)} sets of stages, but {MAX_STATES} are looked through; leave machines out, "
            "give equal ones the same costs and links, or probe those of many ranks with a larger -tp"
        )
    return UnitChoices(choices, total - len(choices))


def allowed_costs(machine: Machine, dtypes: Sequence[tuple[str, str]] = ()) -> list[HostCosts]:
    """The costs of a machine among which a plan may choose, the largest tp_size first.

    Args:
        dtypes: see ``choose_units``.
    """
    fitting = machine.costs
    if dtypes:
        ranked = [costs for pair in dtypes for costs in machine.costs if (costs.dtype, costs.quantization) == pair]
        fitting = [costs for costs in ranked if costs.dtype == ranked[0].dtype] if ranked else []
        fitting = [costs for costs in fitting if costs.quantization == fitting[0].quantization]
    return sorted(fitting, key=lambda costs: -costs.tp_size)


def _group_machines(cluster: Cluster) -> list[list[Machine]]:
    """Machines that are equal in costs and links."""
    groups: list[list[Machine]] = []
    digests: list[bytes] = []
    names = [machine.name for machine in cluster.machines]
    links = cluster.link_table()
    for machine in cluster.machines:
        digest = _digest(machine)
        for group, other in zip(groups, digests, strict=True):
            if digest == other and _is_alike(machine.name, [member.name for member in group], names, links):
                group.append(machine)
                break
        else:
            groups.append([machine])
            digests.append(digest)
    return groups


def _digest(machine: Machine) -> bytes:
    """Everything but names."""
    costs = [msgspec.structs.replace(costs, name="", hardware="") for costs in machine.costs]
    return msgspec.json.encode((machine.ranks, costs))


def _is_alike(name: str, group: list[str], names: list[str], links: dict[tuple[str, str], Link]) -> bool:
    """Whether a machine has the links of a group's members, to all others and to each other."""
    others = [other for other in names if other != name and other not in group]
    between = [links[a, b] for a, b in itertools.combinations([*group, name], 2)]
    inside = [links[member, member] for member in (*group, name)]
    return (
        all(links[name, other] == links[group[0], other] for other in others)
        and len(set(between)) == 1
        and len(set(inside)) == 1
    )
