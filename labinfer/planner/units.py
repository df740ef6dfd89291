"""Units: groups of ``tp_size`` ranks of one machine that can run one pipeline stage together; and ways to divide a cluster into
units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from labinfer.base.errors import UserError
from labinfer.planner.cluster import Cluster, Machine, NetworkLink
from labinfer.planner.costs import HostCosts

MAX_STATES = 20_000
"""Maximum number of subsets of units to search, for each combination of tp_sizes and dtypes."""
MAX_CHOICES = 256
"""Maximum combinations of tp_size and dtype over all kinds of machines that are searched per ``FormLevel``."""


@dataclass(frozen=True)
class UnitClass:
    """Units with equal costs and equal links to all other units. A unit is ``tp_size`` ranks of one machine that can
    run one stage."""

    machines: tuple[str, ...]
    """Machine of each unit."""
    costs: HostCosts

    @property
    def count(self) -> int:
        return len(self.machines)

    def link(self, other: UnitClass, links: Mapping[tuple[str, str], NetworkLink]) -> NetworkLink:
        """Link between a unit of this class and one of ``other`` (which may be this class)."""
        return links[self.machines[0], other.machines[-1]]


@dataclass(frozen=True)
class UnitChoices:
    """Ways to divide a cluster into units (see ``UnitClass``). Each way fixes a tp_size and a form (dtype and
    quantization) for every kind of machine."""

    choices: list[list[UnitClass]]
    num_left_out: int = 0
    """Number of choices that are not searched because of ``MAX_CHOICES`` or ``MAX_STATES``."""


class FormLevel(NamedTuple):
    """Distance of a choice from the preferred forms (pairs of dtype and quantization). Each kind of machine has a list of forms in
    order of preference; position 0 is the preferred form."""

    worst: int
    """Largest position, over all kinds of machines, of the chosen form in the list."""
    total: int
    """Sum, over all kinds of machines, of the position of the chosen form in the list."""


FIRST_FORMS = FormLevel(0, 0)


def choose_units(
    cluster: Cluster, dtypes: Sequence[tuple[str, str]] = (), level: FormLevel = FIRST_FORMS
) -> UnitChoices:
    """Enumerate ways to divide the cluster into units (groups of tp_size ranks, each able to run one stage); at most
    ``MAX_CHOICES``, each with at most ``MAX_STATES`` subsets of units. The largest tp_sizes, and so the fewest units,
    come first.

    Args:
        dtypes: allowed pairs of dtype and quantization, most preferred first; empty for any.
        level: how far down the lists of preference the chosen forms are.

    Raises:
        UserError: every way leaves more than ``MAX_STATES`` subsets of units to search.
    """
    groups = _group_machines(cluster)
    forms = [allowed_forms(machines[0], dtypes) or [[None]] for machines in groups]
    total = _count_choices(forms, level)
    options = itertools.chain.from_iterable(
        itertools.product(*(costs[place] for costs, place in zip(forms, places, strict=True)))
        for places in _share_places([min(len(costs) - 1, level.worst) for costs in forms], level.total)
        if max(places, default=0) == level.worst
    )
    choices, sizes = [], []
    for choice in itertools.islice(options, MAX_CHOICES):
        classes: list[UnitClass] = []
        for machines, costs in zip(groups, choice, strict=True):
            if costs is None:
                continue
            units = machines[0].ranks // costs.tp_size
            if units == 1:
                classes.append(UnitClass(tuple(machine.name for machine in machines), costs))
            else:  # links within a machine differ from links to other machines
                classes += [UnitClass((machine.name,) * units, costs) for machine in machines]
        if not classes:  # no dtype that the machine was probed with is allowed
            return UnitChoices([])
        sizes.append(math.prod(each.count + 1 for each in classes))
        if sizes[-1] <= MAX_STATES:
            choices.append(classes)
    if sizes and not choices:
        raise UserError(
            f"{len(cluster.machines)} machines make {min(sizes)} sets of stages, more than the search limit of "
            f"{MAX_STATES}; leave machines out, give identical machines the same costs and links, or probe "
            "machines of many ranks with a larger -tp"
        )
    return UnitChoices(choices, total - len(choices))


def allowed_forms(machine: Machine, dtypes: Sequence[tuple[str, str]] = ()) -> list[list[HostCosts]]:
    """Costs of a machine that a plan may use: one list per form (dtype and quantization) in order of preference, each
    with the largest tp_size first.

    Args:
        dtypes: see ``choose_units``.
    """
    forms = [
        [costs for costs in machine.costs if not dtypes or (costs.dtype, costs.quantization) == pair]
        for pair in dtypes or [("", "")]
    ]
    return [sorted(costs, key=lambda each: -each.tp_size) for costs in forms if costs]


def form_levels(cluster: Cluster, dtypes: Sequence[tuple[str, str]] = ()) -> Iterator[FormLevel]:
    """Yield the form levels for which ``choose_units`` may have choices, in order of distance from the preferred forms. For the
    arguments see ``choose_units``."""
    most = [max(0, len(allowed_forms(machines[0], dtypes)) - 1) for machines in _group_machines(cluster)]
    for worst in range(max(most, default=0) + 1):
        for total in range(worst, sum(min(own, worst) for own in most) + 1):
            yield FormLevel(worst, total)


def _share_places(most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of integers with sum ``total`` in which entry i is between 0 and ``most[i]``."""
    if not most:
        if total == 0:
            yield ()
        return
    for own in range(max(0, total - sum(most[1:])), min(most[0], total) + 1):
        for others in _share_places(most[1:], total - own):
            yield (own, *others)


def _count_choices(forms: Sequence[Sequence[Sequence[HostCosts | None]]], level: FormLevel) -> int:
    """Number of ways that ``choose_units`` would return at ``level`` without ``MAX_CHOICES`` and ``MAX_STATES``."""

    def count(worst: int) -> int:
        """Number of choices whose positions in the lists of forms sum to ``level.total``, none above ``worst``."""
        by_total = {0: 1}
        for costs in forms:
            more: dict[int, int] = {}
            for (total, before), (place, own) in itertools.product(by_total.items(), enumerate(costs[: worst + 1])):
                more[total + place] = more.get(total + place, 0) + before * len(own)
            by_total = more
        return by_total.get(level.total, 0)

    return count(level.worst) - (count(level.worst - 1) if level.worst else 0)


def _group_machines(cluster: Cluster) -> list[list[Machine]]:
    """Machines grouped by equal costs and links."""
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
    """Bytes that are equal for machines with equal numbers of ranks and equal costs, whatever their names."""
    costs = [msgspec.structs.replace(costs, name="", hardware="") for costs in machine.costs]
    return msgspec.json.encode((machine.ranks, costs))


def _is_alike(name: str, group: list[str], names: list[str], links: dict[tuple[str, str], NetworkLink]) -> bool:
    """Whether machine ``name`` has links equal to those of each member of ``group``, both to other machines and within the
    group."""
    others = [other for other in names if other != name and other not in group]
    between = [links[a, b] for a, b in itertools.combinations([*group, name], 2)]
    inside = [links[member, member] for member in (*group, name)]
    return (
        all(links[name, other] == links[group[0], other] for other in others)
        and len(set(between)) == 1
        and len(set(inside)) == 1
    )
