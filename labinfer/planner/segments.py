"""cut_layers: the best contiguous split of unequal layers over machines in a given order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from labinfer.planner.cluster import Cluster
from labinfer.planner.costs import HostCosts
from labinfer.planner.objective import CacheDemand, Criterion, EngineLimits, Parts, Stage, has_room

FAR = float("inf")


def cut_layers(
    order: Sequence[Stage],
    criterion: Criterion,
    cluster: Cluster,
    limits: EngineLimits,
    *,
    demand: CacheDemand,
    target: float,
) -> tuple[Stage, ...] | None:
    """The split of the layers over the stages in ``order`` that has the least value of ``criterion``; None if no split has a value
    below ``target``.

    A dynamic program over stages and layers finds the least sum of stage times if no stage may take longer than a bound. Each split
    found lowers the bound, until the sum alone reaches ``target``.

    Args:
        order: stages in pipeline order; their layers are ignored.
        demand: cache capacity that each stage must have.
    """
    count = len(order[0].costs.layers)
    last = len(order) - 1
    paths = [_Spans(stage.costs, criterion.path, number == 0, number == last) for number, stage in enumerate(order)]
    slowest = [
        _Spans(stage.costs, criterion.bottleneck, number == 0, number == last) for number, stage in enumerate(order)
    ]
    ends = [
        last_ends(stage.costs, limits, demand, is_first=number == 0, is_last=number == last)
        for number, stage in enumerate(order)
    ]
    hops, transfer = criterion.route_seconds(order, cluster)
    least = hops + sum(path.fixed for path in paths)
    bound, best = criterion.largest_bound(target, least), None
    while transfer < bound:
        cut = _cut_below(paths, slowest, ends, count, bound)
        if cut is None:
            break
        spans = list(itertools.pairwise(cut))
        total = hops + sum(path.seconds(*span) for path, span in zip(paths, spans, strict=True))
        most = max(transfer, *(slow.seconds(*span) for slow, span in zip(slowest, spans, strict=True)))
        if criterion.value(total, 0.0) >= target:
            break
        if (value := criterion.value(total, most)) < target:
            target = value
            best = tuple(
                Stage(machine=stage.machine, costs=stage.costs, begin=begin, end=end)
                for stage, (begin, end) in zip(order, spans, strict=True)
            )
        bound = min(most, criterion.largest_bound(target, least))
    return best


class _Spans:
    """Stage time, in seconds, for any contiguous span of layers."""

    def __init__(self, costs: HostCosts, parts: Parts, is_first: bool, is_last: bool):
        self.fixed = sum(
            weight * costs.stage_seconds(shape, {}, is_first=is_first, is_last=is_last) for weight, shape in parts
        )
        by_kind = {
            kind: sum(weight * costs.layer_seconds(kind, shape) for weight, shape in parts)
            for kind in set(costs.layers)
        }
        self.sums = [0.0, *itertools.accumulate(by_kind[kind] for kind in costs.layers)]

    def seconds(self, begin: int, end: int) -> float:
        return self.fixed + self.sums[end] - self.sums[begin]


def last_ends(
    costs: HostCosts, limits: EngineLimits, demand: CacheDemand, *, is_first: bool, is_last: bool
) -> list[int]:
    """For each first layer, the exclusive end of the largest stage that begins there and fits in memory. Only the last stage may
    end after ``costs.last_cut``."""
    count, end, ends = len(costs.layers), 0, []
    most = count if is_last or costs.last_cut is None else costs.last_cut
    for begin in range(count):
        end = max(end, begin)
        while end < most and has_room(
            costs, costs.count_layers(begin, end + 1), limits, demand, is_first=is_first, is_last=is_last
        ):
            end += 1
        ends.append(end)
    return ends


def most_layers(costs: HostCosts, limits: EngineLimits, demand: CacheDemand, *, is_first: bool, is_last: bool) -> int:
    """Maximum number of layers that fit in a stage, maximized over the stage's first layer."""
    count = len(costs.layers)
    ends = last_ends(costs, limits, demand, is_first=is_first, is_last=is_last)
    begins = range(1) if is_first else range(count)
    return max((ends[begin] - begin for begin in begins if not is_last or ends[begin] == count), default=0)


def _cut_below(
    paths: list[_Spans], slowest: list[_Spans], ends: list[list[int]], count: int, bound: float
) -> list[int] | None:
    """First layer of each stage, then ``count``, in the split that has the least sum of stage times, each below ``bound`` seconds;
    None if every split has a stage that takes longer."""
    least = [FAR] * (count + 1)
    least[0] = 0.0
    choices: list[list[int]] = []
    for number, (path, slow, last_ends) in enumerate(zip(paths, slowest, ends, strict=True)):
        following, chosen = [FAR] * (count + 1), [0] * (count + 1)
        for begin in range(number, count):
            if least[begin] == FAR:
                continue
            base = least[begin] + path.fixed - path.sums[begin]
            for end in range(begin + 1, last_ends[begin] + 1):
                if slow.seconds(begin, end) >= bound:
                    break
                if base + path.sums[end] < following[end]:
                    following[end], chosen[end] = base + path.sums[end], begin
        least = following
        choices.append(chosen)
    if least[count] == FAR:
        return None
    cut = [count]
    for chosen in reversed(choices):
        cut.append(chosen[cut[-1]])
    return cut[::-1]
