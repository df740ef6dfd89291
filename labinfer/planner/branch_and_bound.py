"""BranchAndBound: exact search for the layout with the least value of a ``Criterion``, over sets of units. A unit is ``tp_size``
ranks that can run one stage; equal units form a class.

The search assumes that all layers have equal costs. Given a set of units, its first and last stage, and an upper bound on the stage
time, the sum of stage times is least if each unit has one layer and the cheapest units have all others, up to the bound and their
memory. The times of hops (sends between stages) do not depend on the layers: the cheapest order of a set is the shortest path
through it (Held and Karp, 1962; ``routes.py``). Each layout found lowers the bound on the stage time, until the sum of stage times
alone exceeds the best value. Sets of units that cannot beat the best layout so far are skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from labinfer.planner.feasible_orders import FeasibleOrders
from labinfer.planner.max_layers import MaxLayers
from labinfer.planner.objective import CacheDemand, Criterion, Parts, Stage, make_criteria
from labinfer.planner.problem import Problem, Solution
from labinfer.planner.routes import Routes, State, StateGraph
from labinfer.planner.segments import cut_layers
from labinfer.planner.units import UnitClass

NEAR_FACTOR = 1.1
"""For models with several kinds of layers: the search first values each order of units as if all layers had their mean cost. Orders
within this factor of the best value are valued again with the real costs of their layers."""
MAX_ORDERS = 24
"""Maximum number of stage orders over which the layers are split by their real costs."""


@dataclass(frozen=True)
class _Line:
    """Time of a stage as a linear function of its number of layers: ``fixed + layers * per_layer`` seconds, plus
    ``first`` on the first stage and ``last`` on the last stage of the model. ``last`` is negative if the last layer
    saves more time than the LM head takes."""

    fixed: float
    per_layer: float
    first: float
    last: float

    @classmethod
    def make(cls, unit: UnitClass, parts: Parts) -> _Line:
        costs = unit.costs
        fixed = first = last = per_layer = 0.0
        kinds = costs.count_layers(0, len(costs.layers))
        for weight, shape in parts:
            fixed += weight * (costs.fixed + costs.between_seconds(shape))
            first += weight * (costs.embed.at(shape.rows) + costs.overheads.plan_seconds(shape.num_sequences))
            last += weight * costs.last_seconds(shape)
            total = sum(count * costs.layer_seconds(kind, shape) for kind, count in kinds.items())
            per_layer += weight * total / len(costs.layers)
        return cls(fixed, per_layer, first, last)

    @property
    def least_fixed(self) -> float:
        """Seconds of a stage without layers, at the position in the pipeline (first, inner or last) where it is fastest."""
        return self.fixed + min(0.0, self.last)

    def layers_below(self, bound: float, cap: int) -> int:
        """Largest number of layers, up to ``cap``, with which a stage takes less than ``bound`` seconds. The stage is timed at the
        position in the pipeline (first, inner or last) where it is fastest."""
        return _layers_below(bound, self.least_fixed, self.per_layer, cap)


def _layers_below(bound: float, fixed: float, per_layer: float, cap: int) -> int:
    if fixed + cap * per_layer < bound:
        return cap
    if fixed + per_layer >= bound:
        return 0
    layers = min(cap, int((bound - fixed) / per_layer))
    while layers and fixed + layers * per_layer >= bound:
        layers -= 1
    return layers


@dataclass(frozen=True, kw_only=True)
class _UnitGroup:
    """Units of one class that have one role in a layout: first, inner or last stage."""

    role: tuple[int, bool, bool]
    """Index of the units' class, whether they are the first stage, and whether they are the last stage."""
    count: int
    path_fixed: float
    path_layer: float
    """Seconds of a unit's stage without layers, and seconds per layer, in the steps of ``Criterion.path``."""
    most_fixed: float
    most_layer: float
    """Seconds of a unit's stage without layers, and seconds per layer, in the steps of ``Criterion.bottleneck``."""
    cap: int
    """Layers that fit in the memory of each unit."""

    def layers_below(self, bound: float) -> int:
        """Largest number of layers, up to ``self.cap``, with which the stage of one unit takes less than ``bound`` seconds."""
        return _layers_below(bound, self.most_fixed, self.most_layer, self.cap)


@dataclass(frozen=True, kw_only=True)
class _CriterionLines:
    """Stage times and layer capacities of every class for one criterion."""

    criterion: Criterion
    path: list[_Line]
    """Stage time of each class in the steps of ``criterion.path``."""
    most: list[_Line]
    """Stage time of each class in the steps of ``criterion.bottleneck``."""
    caps: dict[tuple[int, bool, bool], int]
    routes: Routes
    least_value: float
    """Lower bound on the value of every layout under the criterion."""


@dataclass(kw_only=True)
class BranchAndBound:
    """Search for the best layout over all sets of units, each given as the number of units per class."""

    problem: Problem
    classes: list[UnitClass]
    known: Solution | None
    """Best layout of earlier searches; only better layouts count."""
    max_layers: MaxLayers
    best: Solution | None = None
    near: dict[tuple[Criterion, tuple[str, ...]], Solution] = field(default_factory=dict)
    """With several kinds of layers: the best layout if every layer had the mean cost, by criterion and order of
    machines."""

    def run(self) -> Solution | None:
        """A layout that is better than ``known``; None if there is none."""
        problem, classes = self.problem, self.classes
        self.num_layers = len(classes[0].costs.layers)
        self.is_alike = len(set(classes[0].costs.layers)) == 1
        self.target = self.known.value if self.known else float("inf")
        self.links = problem.cluster.link_table()
        self.graph = StateGraph(classes)
        num_units = min(self.num_layers, sum(each.count for each in classes))
        self.states = [state for state in self.graph.states if sum(state) <= num_units and self._is_allowed(state)]
        self.criteria = list(make_criteria(problem.objective, problem.request, problem.limits, num_units))
        prepared = [lines for criterion in self.criteria if (lines := self._prepare(criterion)) is not None]
        for lines in sorted(prepared, key=lambda lines: lines.least_value):
            if lines.least_value >= self.target * self._slack:
                break
            self._search(lines)
        if self.is_alike:
            return self.best
        return self._cut_unlike_layers()

    @property
    def _slack(self) -> float:
        return 1.0 if self.is_alike else NEAR_FACTOR

    def _is_allowed(self, state: State) -> bool:
        """Whether the set of units ``state`` has enough units for the required machines and the first machine."""
        needed = {*self.problem.required, self.problem.first}
        return all(count >= len({*each.machines} & needed) for count, each in zip(state, self.classes, strict=True))

    def _prepare(self, criterion: Criterion) -> _CriterionLines | None:
        """Stage times and layer capacities for ``criterion``; None if the model does not fit."""
        demand = self.problem.cache_demand(criterion.num_seqs)
        caps = {
            (number, first, last): self.max_layers.count(each.costs, demand, is_first=first, is_last=last)
            for number, each in enumerate(self.classes)
            for first, last in itertools.product((False, True), repeat=2)
        }
        path = [_Line.make(each, criterion.path) for each in self.classes]
        most = [_Line.make(each, criterion.bottleneck) for each in self.classes]
        free = [caps[number, False, False] for number in range(len(self.classes))]
        if sum(cap * each.count for cap, each in zip(free, self.classes, strict=True)) < self.num_layers:
            return None
        usable = [number for number, cap in enumerate(free) if cap]
        total = self.num_layers * min(path[number].per_layer for number in usable)
        total += min(path[number].fixed for number in usable) * criterion.num_stages[0]
        total += min(path[number].last for number in usable)
        least = criterion.value(total, self._least_most(most, free))
        return _CriterionLines(
            criterion=criterion,
            path=path,
            most=most,
            caps=caps,
            routes=Routes(criterion, self.classes, self.links, self.graph),
            least_value=least,
        )

    def _least_most(self, most: list[_Line], caps: list[int]) -> float:
        """Lower bound, by bisection, on the seconds of the slowest stage of any layout."""
        low, high = 0.0, max(line.fixed + self.num_layers * line.per_layer for line in most)
        for _ in range(30):
            middle = (low + high) / 2
            layers = 0
            for line, cap, each in zip(most, caps, self.classes, strict=True):
                if line.per_layer * cap + line.least_fixed <= middle:
                    layers += cap * each.count
                elif line.least_fixed < middle:
                    layers += int((middle - line.least_fixed) / line.per_layer) * each.count
            low, high = (low, middle) if layers >= self.num_layers else (middle, high)
        return low

    def _search(self, lines: _CriterionLines) -> None:
        """Search all sets of units for layouts with a value below ``self.target``, the value of the best layout so far."""
        criterion, path = lines.criterion, lines.path
        fewest, most_stages = criterion.num_stages
        numbers = range(len(self.classes))
        free = [lines.caps[number, False, False] for number in numbers]
        hops = lines.routes.least_hops
        single = [line.fixed + line.per_layer for line in path]
        target, below = None, []
        for state in self.states:
            size = sum(state)
            if not fewest <= size <= most_stages:
                continue
            if target != self.target * self._slack:
                target = self.target * self._slack
                bound = criterion.largest_bound(target, 0.0)
                below = [lines.most[n].layers_below(bound, free[n]) for n in numbers]
            used = [number for number in numbers if state[number]]
            if sum(state[n] * below[n] for n in used) < self.num_layers or not all(below[n] for n in used):
                continue
            total = sum(state[n] * single[n] for n in used)
            total += (self.num_layers - size) * min(path[n].per_layer for n in used)
            total += min(path[n].first for n in used) + min(path[n].last for n in used)
            if size > 1:
                total += sum(state[n] * hops[n] for n in used) - max(hops[n] for n in used)
            if criterion.value(total, 0.0) >= target:
                continue
            for first, last in self._ends(state, used):
                self._improve(lines, state, first, last)

    def _ends(self, state: State, used: list[int]) -> Iterator[tuple[int, int]]:
        """Yield possible classes of the first and the last stage of a layout of the units ``state``. ``used`` lists the classes
        that ``state`` has units of."""
        for first in used:
            if self.problem.first and self.problem.first not in self.classes[first].machines:
                continue
            for last in used:
                if (first != last) == (sum(state) > 1) or state[first] > 1:
                    yield first, last

    def _groups(self, lines: _CriterionLines, state: State, first: int, last: int) -> list[_UnitGroup]:
        """Units of ``state`` grouped by class and role (first, inner or last stage), by increasing time per layer."""
        roles: dict[tuple[int, bool, bool], int] = {(n, False, False): count for n, count in enumerate(state)}
        ends = [(first, True, True)] if sum(state) == 1 else [(first, True, False), (last, False, True)]
        for number, is_first, is_last in ends:
            roles[number, False, False] -= 1
            roles[number, is_first, is_last] = 1
        groups = []
        for (number, is_first, is_last), count in roles.items():
            if count:
                path, most = lines.path[number], lines.most[number]
                groups.append(
                    _UnitGroup(
                        role=(number, is_first, is_last),
                        count=count,
                        path_fixed=path.fixed + path.first * is_first + path.last * is_last,
                        path_layer=path.per_layer,
                        most_fixed=most.fixed + most.first * is_first + most.last * is_last,
                        most_layer=most.per_layer,
                        cap=lines.caps[number, is_first, is_last],
                    )
                )
        return sorted(groups, key=lambda group: group.path_layer)

    def _improve(self, lines: _CriterionLines, state: State, first: int, last: int) -> None:
        """Find the best layout of the units ``state`` whose first and last stage have the classes ``first`` and ``last``. Record it
        if its value is below ``self.target``."""
        criterion = lines.criterion
        groups = self._groups(lines, state, first, last)
        size = sum(state)
        least = sum(group.count * (group.path_fixed + group.path_layer) for group in groups)
        least += (self.num_layers - size) * groups[0].path_layer
        if criterion.value(least, 0.0) >= self.target * self._slack:
            return
        target = self.target * self._slack
        bound = criterion.largest_bound(target, least)
        while True:
            route = lines.routes.shortest(state, first, last, bound)
            if route is None or criterion.value(least + route.seconds, 0.0) >= target:
                return
            layers = _share_layers(groups, self.num_layers, bound)
            if layers is None:
                return
            total = route.seconds + sum(
                group.count * group.path_fixed + count * group.path_layer
                for group, count in zip(groups, layers, strict=True)
            )
            if criterion.value(total, 0.0) >= target:
                return
            most = max(
                group.most_fixed + -(-count // group.count) * group.most_layer
                for group, count in zip(groups, layers, strict=True)
            )
            most = max(most, route.transfer)
            value = criterion.value(total, most)
            if value < target:
                self._keep(value, criterion, route.order, groups, layers)
                target = value
            bound = min(most, criterion.largest_bound(target, least))

    def _keep(
        self, value: float, criterion: Criterion, order: tuple[int, ...], groups: list[_UnitGroup], layers: list[int]
    ) -> None:
        """Record a layout in ``near``; if ``value`` is below ``self.target``, also record it as the best one."""
        stages = self._make_stages(order, groups, layers)
        solution = Solution(value, criterion, stages)
        if not self.is_alike:
            key = criterion, tuple(stage.machine for stage in stages)
            if key not in self.near or value < self.near[key].value:
                self.near[key] = solution
        if value < self.target:
            self.target, self.best = value, solution

    def _make_stages(self, order: Sequence[int], groups: list[_UnitGroup], layers: list[int]) -> tuple[Stage, ...]:
        """Stages of the classes in ``order``, with the layers of each group divided evenly among its units."""
        shares: dict[tuple[int, bool, bool], list[int]] = {}
        for group, total in zip(groups, layers, strict=True):
            even, rest = divmod(total, group.count)
            shares[group.role] = [even + (index < rest) for index in range(group.count)]
        begin, stages = 0, []
        for place, (unit, name) in enumerate(zip(order, self._names(order), strict=True)):
            count = shares[unit, place == 0, place == len(order) - 1].pop()
            stages.append(Stage(machine=name, costs=self.classes[unit].costs, begin=begin, end=begin + count))
            begin += count
        return tuple(stages)

    def _names(self, order: Sequence[int]) -> list[str]:
        """Name of the machine that runs each stage. ``order`` has the class of each stage; of its machines, that of rank 0 is used
        first, then required machines, then others."""
        problem = self.problem
        left = [
            sorted(each.machines, key=lambda name: (name != problem.first, name not in problem.required))
            for each in self.classes
        ]
        return [left[unit].pop(0) for unit in order]

    def _cut_unlike_layers(self) -> Solution | None:
        """The best split of the layers by their real costs, over the stage orders that are nearly best with mean costs.

        If the layers fit in none of these orders and ``known`` is None, tries the orders of ``FeasibleOrders``.
        """
        target = self.known.value if self.known else float("inf")
        best = None
        for solution in sorted(self.near.values(), key=lambda solution: solution.value)[:MAX_ORDERS]:
            criterion, problem = solution.criterion, self.problem
            demand = problem.cache_demand(criterion.num_seqs)
            stages = cut_layers(
                solution.stages, criterion, problem.cluster, problem.limits, demand=demand, target=target
            )
            if stages is not None:
                target = criterion.evaluate(stages, problem.cluster)
                best = replace(solution, value=target, stages=stages)
        return best if best or self.known else self._cut_feasible_orders()

    def _cut_feasible_orders(self) -> Solution | None:
        """The best split of the layers by their real costs, over stage orders in which they fit in memory; None if
        they fit in none."""
        problem, best = self.problem, None
        firsts = [n for n, each in enumerate(self.classes) if problem.first in ("", *each.machines)]
        orders: dict[CacheDemand, list[tuple[int, ...]]] = {}
        for criterion in self.criteria:
            demand = problem.cache_demand(criterion.num_seqs)
            if demand not in orders:
                feasible = FeasibleOrders(self.classes, self.graph, problem.limits, demand, firsts=firsts)
                orders[demand] = list(itertools.islice(feasible.orders({*self.states}), MAX_ORDERS))
            for order in orders[demand]:
                if not criterion.num_stages[0] <= len(order) <= criterion.num_stages[1]:
                    continue
                units = [
                    Stage(machine=name, costs=self.classes[n].costs, begin=0, end=0)
                    for n, name in zip(order, self._names(order), strict=True)
                ]
                target = best.value if best else float("inf")
                stages = cut_layers(units, criterion, problem.cluster, problem.limits, demand=demand, target=target)
                if stages is not None:
                    best = Solution(criterion.evaluate(stages, problem.cluster), criterion, stages)
        return best


def _share_layers(groups: list[_UnitGroup], num_layers: int, bound: float) -> list[int] | None:
    """Number of layers of each group that minimizes the sum of stage times, with every stage below ``bound`` seconds;
    None if the groups cannot hold ``num_layers``.

    Args:
        groups: sorted by time per layer, cheapest first.
    """
    below = [group.layers_below(bound) for group in groups]
    left = num_layers - sum(group.count for group in groups)
    if not all(below) or left < 0:
        return None
    layers = []
    for group, most in zip(groups, below, strict=True):
        more = min(left, group.count * (most - 1))
        layers.append(group.count + more)
        left -= more
    return None if left else layers
