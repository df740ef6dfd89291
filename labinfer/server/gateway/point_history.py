"""PointHistory: a model's ``StatsPoint``s of the last hour. Older points are merged, so that memory is bounded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec

from labinfer.server.gateway.cluster_answers import StatsPoint

HISTORY_SECONDS = 3600.0
"""Maximum age of a ``StatsPoint`` in seconds; older points are dropped."""
FINE_SECONDS = 300.0
"""Age, in seconds, above which points are merged. It is also the maximum age of a trace slice relative to the latest one."""
MERGED_SECONDS = 10.0
"""Seconds that a merged point covers. Some values of a point are for the minute before the point, so values of merged points
overlap."""
POINT_SECONDS = 0.4
"""Minimum seconds between two points. An engine sends stats whenever work begins and ends, which is more often if requests are
short."""


class PointHistory:
    """The points of a model in the last ``HISTORY_SECONDS``.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._fine: deque[StatsPoint] = deque(maxlen=math.ceil(FINE_SECONDS / POINT_SECONDS))
        self._merged: deque[StatsPoint] = deque(maxlen=math.ceil(HISTORY_SECONDS / MERGED_SECONDS))

    @property
    def is_empty(self) -> bool:
        """Whether no point was younger than ``FINE_SECONDS`` at the last call of ``add`` or ``read``."""
        return not self._fine

    def add(self, point: StatsPoint) -> None:
        """Add ``point``, which must be later than all other points."""
        self._age()
        self._fine.append(point)

    def read(self) -> list[StatsPoint]:
        """All points, oldest first."""
        self._age()
        return [*self._merged, *self._fine]

    def _age(self) -> None:
        """Merge points older than ``FINE_SECONDS``, and drop points older than ``HISTORY_SECONDS``."""
        now, merged = self._clock(), self._merged
        while self._fine and self._fine[0].time_us < (now - FINE_SECONDS) * 1e6:
            point = self._fine.popleft()
            if merged and _interval(merged[-1]) == _interval(point):
                merged[-1] = merge_stats_points(merged[-1], point)
            else:
                merged.append(point)
        while merged and merged[0].time_us < (now - HISTORY_SECONDS) * 1e6:
            merged.popleft()


def _interval(point: StatsPoint) -> int:
    return int(point.time_us // (MERGED_SECONDS * 1e6))


def merge_stats_points(first: StatsPoint, second: StatsPoint) -> StatsPoint:
    """Merge two consecutive points into one. Rates of the result cover the time of both points; all other values are those of
    ``second``."""
    seconds = first.seconds + second.seconds
    steps = [point.steps_per_second * point.seconds for point in (first, second)]
    tokens = first.tokens_per_step * steps[0] + second.tokens_per_step * steps[1]

    def mean(before: float, after: float) -> float:
        return (before * first.seconds + after * second.seconds) / seconds

    busy_before = {rank.rank: rank.busy for rank in first.ranks}
    ranks = []
    for rank in second.ranks:
        before, after = busy_before.get(rank.rank), rank.busy
        if before is not None:
            after = before if after is None else mean(before, after)
        ranks.append(msgspec.structs.replace(rank, busy=after))
    return msgspec.structs.replace(
        second,
        seconds=seconds,
        steps_per_second=sum(steps) / seconds,
        tokens_per_step=tokens / sum(steps) if sum(steps) else 0.0,
        prompt_tokens_per_second=mean(first.prompt_tokens_per_second, second.prompt_tokens_per_second),
        generation_tokens_per_second=mean(first.generation_tokens_per_second, second.generation_tokens_per_second),
        ranks=ranks,
    )
