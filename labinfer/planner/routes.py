"""Routes: the order of a layout's stages that has the cheapest hops (sends of activations from one stage to the next)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from labinfer.planner.cluster import NetworkLink
from labinfer.planner.costs import HostCosts
from labinfer.planner.objective import Criterion
from labinfer.planner.units import UnitClass

State = tuple[int, ...]
"""A set of units, as the number of units of each ``UnitClass``."""
FAR = float("inf")


@dataclass(frozen=True)
class StageRoute:
    """An order of stages, with the times of the sends between its stages."""

    seconds: float
    """Seconds of all hops from the first to the last stage, and of the return of the sampled tokens to the first
    stage."""
    transfer: float
    """Longest time for which any link is busy, in seconds."""
    order: tuple[int, ...]
    """Index of the unit class of each stage."""


class StateGraph:
    """Graph of the dynamic program. A node (``State``) is a set of units in use, as the number of units per class; the edges
    ``next`` add one unit. Nodes are sorted by number of units."""

    def __init__(self, classes: Sequence[UnitClass]):
        ranges = [range(each.count + 1) for each in classes]
        self.states: list[State] = sorted((state for state in itertools.product(*ranges) if any(state)), key=sum)
        self.next: dict[State, list[tuple[int, State]]] = {
            state: [
                (number, (*state[:number], state[number] + 1, *state[number + 1 :]))
                for number, each in enumerate(classes)
                if state[number] < each.count
            ]
            for state in self.states
        }


class Routes:
    """Cheapest stage order of each set of units, for one criterion: the shortest path over the hops (Held and Karp,
    1962)."""

    def __init__(
        self,
        criterion: Criterion,
        classes: Sequence[UnitClass],
        links: Mapping[tuple[str, str], NetworkLink],
        graph: StateGraph,
    ):
        self._criterion, self._classes, self._links, self._graph = criterion, classes, links, graph
        self._tables: dict[tuple[int, int], dict[State, list[tuple[float, int]]]] = {}

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs of unit classes (by index) that two consecutive stages may have: different classes, or one class with
        several units."""
        numbers = range(len(self._classes))
        return [(a, b) for a in numbers for b in numbers if a != b or self._classes[a].count > 1]

    @cached_property
    def _hops(self) -> dict[tuple[int, int], float]:
        return {pair: self._criterion.hop_seconds(*self._hop(*pair)) for pair in self._pairs}

    @cached_property
    def _transfers(self) -> dict[tuple[int, int], float]:
        return {pair: self._criterion.transfer_seconds(*self._hop(*pair)) for pair in self._pairs}

    @cached_property
    def _is_even(self) -> bool:
        """Whether all links between units are equal, so that the order of the stages does not matter."""
        return len(set(self._hops.values())) <= 1 and len(set(self._transfers.values())) <= 1

    @cached_property
    def least_hops(self) -> list[float]:
        """For each unit class, the seconds of the cheapest hop from one of its units."""
        return [
            min((seconds for (a, _), seconds in self._hops.items() if a == number), default=0.0)
            for number in range(len(self._classes))
        ]

    def shortest(self, state: State, first: int, last: int, bound: float) -> StageRoute | None:
        """The cheapest stage order of the units of ``state`` that begins with class ``first``, ends with class ``last``
        and keeps every link busy for less than ``bound`` seconds; None if there is none."""
        if sum(state) == 1:
            return StageRoute(0.0, 0.0, (first,))
        back = self._criterion.return_seconds(self._link(last, first))
        if self._is_even:
            inner = [number for number, count in enumerate(state) for _ in range(count)]
            inner.remove(first)
            inner.remove(last)
            order = (first, *inner, last)
            seconds = sum(self._hops[pair] for pair in itertools.pairwise(order))
        else:
            table = self._table(first, sum(transfer < bound for transfer in self._transfers.values()))
            if state not in table or (seconds := table[state][last][0]) == FAR:
                return None
            order = self._trace(table, state, last)
        transfer = max(self._transfers[pair] for pair in itertools.pairwise(order))
        return StageRoute(seconds + back, transfer, order) if transfer < bound else None

    def _hop(self, a: int, b: int) -> tuple[HostCosts, HostCosts, NetworkLink]:
        """Costs of sending class ``a`` and of receiving class ``b``, and the link between them."""
        return self._classes[a].costs, self._classes[b].costs, self._link(a, b)

    def _link(self, a: int, b: int) -> NetworkLink:
        return self._classes[a].link(self._classes[b], self._links)

    def _table(self, first: int, num_links: int) -> dict[State, list[tuple[float, int]]]:
        """Shortest paths from class ``first`` over the ``num_links`` least busy pairs of classes. For each state, by last class:
        the seconds of the path, and the class before the last."""
        if (first, num_links) in self._tables:
            return self._tables[first, num_links]
        count = len(self._classes)
        allowed = sorted(self._pairs, key=self._transfers.__getitem__)[:num_links]
        hops = [[FAR] * count for _ in range(count)]
        for a, b in allowed:
            hops[a][b] = self._hops[a, b]
        start = tuple(int(number == first) for number in range(count))
        table = {start: [(0.0 if number == first else FAR, -1) for number in range(count)]}
        for state in self._graph.states:
            if (row := table.get(state)) is None:
                continue
            for last, (seconds, _) in enumerate(row):
                if seconds == FAR:
                    continue
                here = hops[last]
                for number, following in self._graph.next[state]:
                    reached = seconds + here[number]
                    if reached == FAR:
                        continue
                    target = table.get(following)
                    if target is None:
                        target = table[following] = [(FAR, -1)] * count
                    if reached < target[number][0]:
                        target[number] = (reached, last)
        self._tables[first, num_links] = table
        return table

    @staticmethod
    def _trace(table: dict[State, list[tuple[float, int]]], state: State, last: int) -> tuple[int, ...]:
        """Stage order (class indices) of the path that ends with class ``last`` in ``table[state]``."""
        order = [last]
        while sum(state) > 1:
            before = table[state][last][1]
            state = (*state[:last], state[last] - 1, *state[last + 1 :])
            last = before
            order.append(last)
        return tuple(reversed(order))
