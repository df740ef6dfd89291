"""Autotuning: time the implementations for each bucket of batch sizes, cache the times, and agree on a choice across ranks.

Only 16-bit models are tuned. Implementations round differently, so with a choice by batch size a request's logits depend on the other
requests in the batch. A float32 model gives the same tokens in every batch, and always uses the preferred implementations.
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

from labinfer.functions.dispatch import BATCH_BUCKETS
from labinfer.functions.rank_calls import RankCalls
from labinfer.functions.registry import Choice, Implementation
from labinfer.native.cache_file import FORMAT, Damaged, read_sealed, write_sealed

logger = logging.getLogger(__name__)

TIMED_ROWS = (1, 4, 16, 64, 256)
"""Batch size (rows) that is timed for each bucket of ``BATCH_BUCKETS``."""
SECONDS = 0.02
"""Time budget in seconds for the candidates of a target (see ``Choice``) at one batch size, on an idle machine."""
MIN_ROUNDS, MAX_ROUNDS = 3, 30
MAX_OVERRUN = 10
"""Maximum factor on ``SECONDS`` if other processes disturb the timing."""
DROPOUT_RATIO = 2.0
"""Ratio to the best candidate's time above which a candidate is no longer timed."""
MARGIN = 0.1
"""Minimum saving, as a fraction of the time of the preferred one, for another weight layout to be chosen: a smaller one is noise, and a stable
choice gives the same tokens at every start."""
ROWS_MARGIN = 0.05
"""Minimum saving, as a fraction of the preferred candidate's time, for another candidate of the chosen weight layout to be chosen for a bucket."""

MAX_SPREAD = 1.15
"""Largest ratio of median to minimum time (geometric mean over all timings) that counts as an idle machine. Decision 14 has the
measurements."""
MAX_STARTS = 4
"""Maximum number of program starts at which candidates are timed: on a machine that is never idle, more give no better times."""
ONE_FOR_ALL = frozenset({"paged_attention"})
"""Targets with one implementation for all buckets, so that a token gets the same bits in any batch."""


class Timing(msgspec.Struct, frozen=True):
    """Times of a candidate for each bucket of batch sizes."""

    name: str
    layout: str
    seconds: list[float]
    """Minimum time in seconds for each bucket."""
    medians: list[float]
    """Median times in seconds: larger than ``seconds`` if other processes took cores or memory bandwidth."""
    starts: int = 1
    """Number of program starts whose times are merged here."""

    def merge(self, other: Timing) -> Timing:
        """Element-wise minimum with a candidate's times from another program start: load on the machine only adds time."""
        return msgspec.structs.replace(
            self,
            seconds=list(map(min, self.seconds, other.seconds)),
            medians=list(map(min, self.medians, other.medians)),
            starts=self.starts + other.starts,
        )


Times = dict[str, list[Timing]]
"""Timings of the candidate functions of each target, the preferred one last."""


def is_tuned(dtype: torch.dtype) -> bool:
    """Whether implementations for models of ``dtype`` are autotuned."""
    return dtype.itemsize < torch.float32.itemsize


def time_candidates(
    calls: RankCalls,
    candidates: Mapping[str, Mapping[str, Implementation]],
    seconds: float = SECONDS,
    dropout_ratio: float = DROPOUT_RATIO,
) -> Times:
    """Time ``candidates`` (by target and name) at every batch size of ``TIMED_ROWS``."""
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
    """Seconds of each repetition of each call. Calls alternate, so that a disturbance hits all of them; the first repetition is a warm-up.

    Args:
        finish: waits until the device has finished.
        seconds: time budget, counted in minimum times: a call that was interrupted is worth repeating.
        dropout_ratio: ratio to the best time above which a call drops out.
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
    """Whether the machine was busy while ``times`` were measured, so that timing again at the next program start may give better ones.

    The measure is the ratio of a call's median time to its minimum, as the geometric mean over all timings. The ratio of a single
    call tells nothing: with few repetitions it may be 2 even on an idle machine. False after ``MAX_STARTS`` program starts.
    """
    timings = [timing for candidates in times.values() for timing in candidates]
    if not timings or timings[0].starts >= MAX_STARTS:
        return False
    spreads = [
        median / least for timing in timings for median, least in zip(timing.medians, timing.seconds, strict=True)
    ]
    return statistics.geometric_mean(spreads) > MAX_SPREAD


def merge(times: Times, others: Times) -> Times:
    """Merge the times of equal candidates from several program starts."""
    return {
        target: [timing.merge(other) for timing, other in zip(times[target], timings, strict=True)]
        for target, timings in others.items()
    }


def choose(ranks: Sequence[Times]) -> Choice:
    """One choice for all ranks that hold shards of the same layers, from the times of every rank.

    The ranks synchronize in every layer, so the slowest rank's time counts. A weight layout is chosen by the geometric mean of its
    times over all buckets, and within that layout an implementation for each bucket. Only candidates that all ranks have are
    considered. For the targets in ``ONE_FOR_ALL``, one implementation is chosen by the geometric mean, too.
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
    """Human-readable choice: ``linear cpu-dot, from 129 rows cpu; …``."""
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
    """Mean logarithm of the seconds of a weight layout's fastest candidate, over the buckets."""
    least = [min(by_class) for by_class in zip(*seconds, strict=True)]
    return sum(math.log(max(seconds, 1e-9)) for seconds in least) / len(least)


def _fastest(seconds: Mapping[str, float]) -> str:
    """The preferred candidate, which is the last, unless another one is faster by ``ROWS_MARGIN``."""
    preferred = list(seconds)[-1]
    name = min(seconds, key=seconds.__getitem__)
    return name if seconds[name] < (1 - ROWS_MARGIN) * seconds[preferred] else preferred


# Cache files of times: one for each combination of machine, library, model and thread count.


def file_name(*key: object) -> str:
    """File name of the cached times: a digest of ``key``, everything that they depend on (machine, library, model,
    number of threads)."""
    digest = hashlib.blake2b(repr((FORMAT, TIMED_ROWS, BATCH_BUCKETS, *key)).encode(), digest_size=8)
    return f"times-{digest.hexdigest()}.json"


def read_times(path: Path, calls: RankCalls) -> Times | None:
    """Times from a cache file; None if the file is missing, damaged, or was written for other candidates than those of ``calls``."""
    try:
        times = msgspec.json.decode(read_sealed(path), type=Times)
    except FileNotFoundError:
        return None
    except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s is ignored (%s); kernels are timed again", path, error)
        return None
    expected = {
        target: [(name, item.layout) for name, item in candidates.items()]
        for target, candidates in calls.contested().items()
    }
    names = {target: [(timing.name, timing.layout) for timing in timings] for target, timings in times.items()}
    seconds = [each for timings in times.values() for timing in timings for each in (timing.seconds, timing.medians)]
    plausible = all(len(each) == len(TIMED_ROWS) and all(0 < number < math.inf for number in each) for each in seconds)
    if names != expected or not plausible:
        logger.warning("%s is ignored (other candidates, or invalid times); kernels are timed again", path)
        return None
    return times


def write_times(path: Path, times: Times) -> None:
    """Write ``times`` to a cache file atomically, so that several processes may write it concurrently.

    Raises:
        OSError: it cannot be written.
    """
    write_sealed(path, msgspec.json.encode(times))
