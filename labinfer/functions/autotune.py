"""Which implementation is the fastest here: measured for each class of rows, remembered, agreed upon.

Only 16-bit models are tuned. Implementations differ in how they round, so with a choice by rows a request's numbers depend
on who else is in the batch; a float32 model gives the same tokens in every batch, and always takes the preferred ones.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from labinfer.functions.rank_calls import RankCalls
from labinfer.functions.registry import BATCH_BUCKETS, Choice, Implementation
from labinfer.native.cache_file import FORMAT, Damaged, read_sealed, write_sealed

logger = logging.getLogger(__name__)

TIMED_ROWS = (1, 4, 16, 64, 256)
"""A number of rows in each of ``BATCH_BUCKETS``."""
SECONDS = 0.02
"""Time for the candidates of a target at one number of rows, undisturbed."""
MIN_ROUNDS, MAX_ROUNDS = 3, 30
MAX_OVERRUN = 10
"""Times ``SECONDS`` that it may take where other processes disturb it."""
DROPOUT_RATIO = 2.0
"""Times the best candidate's time at which another one is not timed further."""
MARGIN = 0.1
"""Fraction of the preferred layout's time that another one must save to be taken instead: less is noise, and the same
choice every time gives the same tokens."""
ROWS_MARGIN = 0.05
"""The same for candidates of one layout at a number of rows."""

MAX_SPREAD = 1.15
"""Times the least that a median is, in the mean, on a machine that was idle. Decision 14 has what was measured."""
MAX_STARTS = 4
"""Starts that measure at most: a machine that is never idle gives no better times."""
ONE_FOR_ALL = frozenset({"paged_attention"})
"""Targets that take one implementation for every class of rows: each gives a token the same bits in any batch."""


class Timing(msgspec.Struct, frozen=True):
    """A candidate and its times for each class of rows."""

    name: str
    layout: str
    seconds: list[float]
    """The least."""
    medians: list[float]
    """Seconds: above the least where other processes took cores or memory."""
    starts: int = 1
    """Starts that measured it, whose times were merged."""

    def merge(self, other: Timing) -> Timing:
        """The lesser of each time, for the same candidate at another start: load only ever adds to them."""
        return msgspec.structs.replace(
            self,
            seconds=list(map(min, self.seconds, other.seconds)),
            medians=list(map(min, self.medians, other.medians)),
            starts=self.starts + other.starts,
        )


Times = dict[str, list[Timing]]
"""Timings by target, the preferred candidate last."""


def is_tuned(dtype: torch.dtype) -> bool:
    """Whether the implementations for a model of this dtype may take turns."""
    return dtype.itemsize < torch.float32.itemsize


def time_candidates(
    calls: RankCalls,
    candidates: Mapping[str, Mapping[str, Implementation]],
    seconds: float = SECONDS,
    dropout_ratio: float = DROPOUT_RATIO,
) -> Times:
    """Time these candidates of these targets at every number of rows."""
    times: Times = {}
    for target, implementations in candidates.items():
        by_class = []
        for rows in TIMED_ROWS:
            bound = {name: calls.bind(target, item, rows) for name, item in implementations.items()}
            by_class.append(benchmark(bound, calls.finish, seconds, dropout_ratio))
        times[target] = [
            Timing(
                name,
                item.layout,
                seconds=[min(samples[name]) for samples in by_class],
                medians=[statistics.median(samples[name]) for samples in by_class],
            )
            for name, item in implementations.items()
        ]
        calls.forget_weights()
    return times


def benchmark(
    calls: Mapping[str, Callable[[], object]],
    finish: Callable[[], None],
    seconds: float,
    dropout_ratio: float = DROPOUT_RATIO,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, round by round. They take turns, so that what disturbs this machine disturbs all; a first round
    warms up.

    Args:
        finish: waits until what was called is done.
        seconds: about how long that may take, going by the least times: a call that was interrupted is worth repeating.
        dropout_ratio: times the best time at which a call drops out.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    running, begin = dict(calls), clock()
    for number in range(1, MAX_ROUNDS + 1):
        for name, call in running.items():
            start = clock()
            call()
            finish()
            samples[name].append(clock() - start)
        if number < MIN_ROUNDS:
            continue
        least = {name: min(times) for name, times in samples.items()}
        limit = dropout_ratio * min(least.values())
        running = {name: call for name, call in running.items() if least[name] <= limit}
        next_round = sum(least[name] for name in running)
        if number * next_round > seconds or clock() - begin > MAX_OVERRUN * seconds:
            break
    return samples


def is_disturbed(times: Times) -> bool:
    """Whether a machine that was not idle gave these times, and another start may give better ones.

    By the mean over all of them: among the few calls of a candidate the median may be twice the least on an idle machine, too.
    """
    timings = [timing for candidates in times.values() for timing in candidates]
    if not timings or timings[0].starts >= MAX_STARTS:
        return False
    spreads = [
        median / least for timing in timings for median, least in zip(timing.medians, timing.seconds, strict=True)
    ]
    return statistics.geometric_mean(spreads) > MAX_SPREAD


def merge(times: Times, others: Times) -> Times:
    """Times of the same candidates at several starts."""
    return {
        target: [timing.merge(other) for timing, other in zip(times[target], timings, strict=True)]
        for target, timings in others.items()
    }


def choose(ranks: Sequence[Times]) -> Choice:
    """The same choice for ranks that hold slices of the same layers, from the times of them all.

    They wait for each other in every layer, so the slowest counts. A layout is chosen by the mean over the classes of how
    much longer it takes, and within it an implementation for each class. Where candidates are not the same on all ranks,
    those that all have are chosen among. For targets that are ``ONE_FOR_ALL`` an implementation is chosen as a layout is.
    """
    choice = {}
    for target, timings in ranks[0].items():
        by_rank = [{timing.name: timing for timing in times.get(target, [])} for times in ranks]
        common = [timing for timing in timings if all(timing.name in others for others in by_rank)]
        if not common:
            continue
        slowest = {
            timing.name: [max(times) for times in zip(*(rank[timing.name].seconds for rank in by_rank), strict=True)]
            for timing in common
        }
        layouts: dict[str, list[str]] = {}
        for timing in common:
            preferred = timing.name if target in ONE_FOR_ALL else timing.layout
            layouts.setdefault(preferred, []).append(timing.name)
        costs = {layout: _mean_log(slowest[name] for name in names) for layout, names in layouts.items()}
        layout = min(costs, key=costs.__getitem__)
        if costs[layout] > costs[preferred] + math.log(1 - MARGIN):
            layout = preferred
        choice[target] = tuple(
            _fastest({name: slowest[name][index] for name in layouts[layout]}) for index in range(len(TIMED_ROWS))
        )
    return choice


def describe(choice: Choice) -> str:
    """``linear cpu-dot, from 129 rows cpu; …``, for people."""
    parts = []
    for target, names in choice.items():
        spans = [names[0]]
        spans += [
            f"from {BATCH_BUCKETS[index - 1] + 1} rows {name}"
            for index, name in enumerate(names)
            if index > 0 and name != names[index - 1]
        ]
        parts.append(f"{target.removeprefix('layer.')} {', '.join(spans)}")
    return "; ".join(parts)


def _mean_log(seconds: Iterable[Sequence[float]]) -> float:
    """Logarithm of the seconds of a layout's fastest candidate, in the mean over the classes."""
    least = [min(by_class) for by_class in zip(*seconds, strict=True)]
    return sum(math.log(max(seconds, 1e-9)) for seconds in least) / len(least)


def _fastest(seconds: Mapping[str, float]) -> str:
    """The preferred candidate, which is the last, unless another one is faster by ``ROWS_MARGIN``."""
    preferred = list(seconds)[-1]
    name = min(seconds, key=seconds.__getitem__)
    return name if seconds[name] < (1 - ROWS_MARGIN) * seconds[preferred] else preferred


# Times are remembered, one file for each rank's circumstances.


def file_name(*circumstances: object) -> str:
    """A name that another machine, library, model or number of threads does not have."""
    digest = hashlib.blake2b(repr((FORMAT, TIMED_ROWS, BATCH_BUCKETS, *circumstances)).encode(), digest_size=8)
    return f"times-{digest.hexdigest()}.json"


def read_times(path: Path, calls: RankCalls) -> Times | None:
    """Times from a file of the cache; None where there is none, it cannot be trusted, or it is not what these calls would give."""
    try:
        times = msgspec.json.decode(read_sealed(path), type=Times)
    except FileNotFoundError:
        return None
    except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is not used (%s); functions are timed anew", path, error)
        return None
    expected = {
        target: [(name, item.layout) for name, item in candidates.items()]
        for target, candidates in calls.contested().items()
    }
    names = {target: [(timing.name, timing.layout) for timing in timings] for target, timings in times.items()}
    seconds = [each for timings in times.values() for timing in timings for each in (timing.seconds, timing.medians)]
    plausible = all(len(each) == len(TIMED_ROWS) and all(0 < number < math.inf for number in each) for each in seconds)
    if names != expected or not plausible:
        logger.warning("%s is not used (it has other candidates or impossible times); functions are timed anew", path)
        return None
    return times


def write_times(path: Path, times: Times) -> None:
    """Write the file as a whole, so that several processes may write it at once.

    Raises:
        OSError: it cannot be written.
    """
    write_sealed(path, msgspec.json.encode(times))
