"""MaxLayers: how many layers fit in the memory of a unit (the ranks of one stage), cached over all searches for a
problem."""

from __future__ import annotations

from labinfer.planner.costs import HostCosts
from labinfer.planner.objective import CacheDemand, EngineLimits, has_room
from labinfer.planner.segments import most_layers


class MaxLayers:
    """Cached maximum numbers of layers that fit in the memory of a unit (the ranks of one stage).

    Args:
        limits: engine limits of the problem. Results are cached by the ``id`` of the costs: the costs passed to ``count`` must
            therefore outlive this object.
    """

    def __init__(self, limits: EngineLimits):
        self._limits = limits
        self._counts: dict[tuple[int, CacheDemand, bool, bool], int] = {}

    def count(self, costs: HostCosts, demand: CacheDemand, *, is_first: bool = False, is_last: bool = False) -> int:
        """Maximum number of layers that fit in a unit's memory. If layers differ, the number depends on the unit's position in the
        pipeline; the best position counts.

        Args:
            demand: KV tokens and sequences that must fit in addition to the layers.
        """
        key = (id(costs), demand, is_first, is_last)
        if key not in self._counts:
            counts = _count_alike if len(set(costs.layers)) == 1 else most_layers
            self._counts[key] = counts(costs, self._limits, demand, is_first=is_first, is_last=is_last)
        return self._counts[key]


def _count_alike(costs: HostCosts, limits: EngineLimits, demand: CacheDemand, *, is_first: bool, is_last: bool) -> int:
    low, high = 0, len(costs.layers)
    while low < high:
        middle = (low + high + 1) // 2
        if has_room(costs, costs.count_layers(0, middle), limits, demand, is_first=is_first, is_last=is_last):
            low = middle
        else:
            high = middle - 1
    return low
