"""FeasibleOrders: orders of units in a pipeline in which a model fits in memory, also if it has several kinds of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from labinfer.planner.objective import CacheDemand, EngineLimits
from labinfer.planner.routes import State, StateGraph
from labinfer.planner.segments import last_ends
from labinfer.planner.units import UnitClass


class FeasibleOrders:
    """Dynamic program over sets of units, smallest first: how many leading layers of the model each set can hold, over
    all stage orders.

    Args:
        demand: cache capacity that each stage must have.
        firsts: indices of the unit classes that may run the first stage.
    """

    def __init__(
        self,
        classes: Sequence[UnitClass],
        graph: StateGraph,
        limits: EngineLimits,
        demand: CacheDemand,
        *,
        firsts: Collection[int],
    ):
        self._graph, self._firsts = graph, firsts
        self._num_layers = len(classes[0].costs.layers)
        self._ends = {
            (number, is_first, is_last): last_ends(each.costs, limits, demand, is_first=is_first, is_last=is_last)
            for number, each in enumerate(classes)
            for is_first in (False, True)
            for is_last in (False, True)
        }
        self._reached: dict[State, set[int]] = {}
        """For each set of units, the numbers of leading layers that it can hold if none of its units is the last
        stage."""

    def orders(self, states: Collection[State]) -> Iterator[tuple[int, ...]]:
        """Yield stage orders (class indices) in which the model fits: one for each set of units and each class that can be the last
        stage.

        Args:
            states: sets of units of which a layout may be made.
        """
        for state in self._graph.states:
            self._reached[state] = {
                end
                for number, begin, spans in self._last_steps(state)
                for end in range(begin + 1, min(spans[begin], self._num_layers - 1) + 1)
            }
            if state in states:
                lasts = {}
                for number, begin, _ in self._last_steps(state):
                    is_first = sum(state) == 1
                    if self._ends[number, is_first, True][begin] == self._num_layers:
                        lasts[number] = begin
                for number, begin in lasts.items():
                    yield (*self._trace(_without(state, number), begin), number)

    def _last_steps(self, state: State) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (class, first layer, ends) for each unit of ``state`` that may run the last of the set's stages. For each first
        layer, ``ends`` has the exclusive end of the largest stage that fits on the unit."""
        is_first = sum(state) == 1
        for number, count in enumerate(state):
            if count and (not is_first or number in self._firsts):
                spans = self._ends[number, is_first, False]
                for begin in (0,) if is_first else self._reached[_without(state, number)]:
                    yield number, begin, spans

    def _trace(self, state: State, end: int) -> tuple[int, ...]:
        """A stage order (class indices) in which the units of ``state`` hold the first ``end`` layers."""
        if not any(state):
            return ()
        number, begin = next((n, b) for n, b, spans in self._last_steps(state) if b < end <= spans[b])
        return (*self._trace(_without(state, number), begin), number)


def _without(state: State, number: int) -> State:
    """``state`` without one of the units of class ``number``."""
    return (*state[:number], state[number] - 1, *state[number + 1 :])
