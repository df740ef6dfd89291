"""StageSlowdownDetector: finds stages that have slowed down since the start, and a better split of the layers.

All stages run the same steps. If all stages become slower, the requests are the cause; if only one stage does, its machine is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from labinfer.base.rank_stats import WorkerStats
from labinfer.server.link.stats import Drift

MIN_SAMPLE_STEPS = 5
"""Minimum number of steps in a sample. A sample is the work of a rank between two reports of its stats. If it has fewer steps, it
is extended to the next report."""
MAX_SAMPLE_SECONDS = 2.0
"""Maximum seconds of a sample that count as work: in the rest of a longer sample, the engine was idle."""
BASELINE_SECONDS, BASELINE_STEPS = 10.0, 100
"""Length of the period after startup to which the baseline of a rank's step times is fitted. It ends when the rank has had both
these seconds of work and this number of steps."""
WINDOW_SECONDS, MIN_WINDOW_SECONDS = 10.0, 8.0
"""Length, in seconds, of the recent work that is compared with the baseline, and minimum seconds of work in it for a stage to count
as slow."""
DRIFTED, RECOVERED = 1.5, 1.25
"""Thresholds of a stage's slowdown (ratio of busy time to baseline, relative to the other stages). Above ``DRIFTED`` a stage counts
as slow, until its slowdown is below ``RECOVERED``."""
MIN_OWN_SLOWDOWN = 1.1
"""Minimum ratio of a slow stage's step time to its own baseline. With a smaller ratio, the stage is not slow: the other
stages have become faster."""
SLOWEST_STAGE_BUSY = 0.7
"""Busy fraction of the busiest stage above which the step time of that stage determines the throughput. Below, the sum of the step
times of all stages does."""
MIN_GAIN = 0.15
"""Minimum throughput gain, as a fraction, at which another split of the layers is reported."""
MAX_KEPT_STEPS = 1 << 20
"""Maximum number of steps whose token counts are kept until all ranks have reported these steps."""


@dataclass(kw_only=True)
class _Sample:
    """The work of a rank between two reports of its stats."""

    seconds: float
    steps: int
    tokens: int
    busy: float
    layers: float
    """Part of ``busy`` (seconds of computing) that was spent inside the layers."""


@dataclass
class _Baseline:
    """Baseline of a rank's busy time: a least-squares fit with a constant per step and a constant per token, in
    seconds."""

    seconds: float = 0.0
    steps: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    fewest: float = math.inf
    """Smallest mean number of tokens per step among the fitted samples; ``most`` is the largest mean number."""
    most: float = 0.0

    def add(self, sample: _Sample) -> None:
        n, t, y = sample.steps, sample.tokens, sample.busy
        self.fewest, self.most = min(self.fewest, t / n), max(self.most, t / n)
        self.seconds += sample.seconds
        self.steps += n
        self.sums = [total + part for total, part in zip(self.sums, (n * n, n * t, t * t, n * y, t * y), strict=True)]

    @property
    def is_complete(self) -> bool:
        return self.seconds >= BASELINE_SECONDS and self.steps >= BASELINE_STEPS

    def covers(self, sample: _Sample) -> bool:
        """Whether steps of the fitted samples had about as many tokens as steps of ``sample``. The baseline is not extrapolated to
        other numbers of tokens, as step times do not grow linearly on every machine."""
        return self.fewest / 2 <= sample.tokens / sample.steps <= 2 * self.most

    def predict(self, sample: _Sample) -> float:
        nn, nt, tt, ny, ty = self.sums
        determinant = nn * tt - nt * nt
        per_step, per_token = 0.0, ty / tt
        if determinant > 1e-6 * nn * tt:  # with one ratio of tokens to steps, only the sum of both constants is known
            per_step = (ny * tt - ty * nt) / determinant
            per_token = (ty * nn - ny * nt) / determinant
            if per_step < 0:
                per_step, per_token = 0.0, ty / tt
            elif per_token < 0:
                per_step, per_token = ny / nn, 0.0
        return per_step * sample.steps + per_token * sample.tokens


@dataclass
class _Rank:
    """Baseline and recent samples of one rank's step times."""

    last: WorkerStats
    num_samples: int = 0
    baseline: _Baseline = field(default_factory=_Baseline)
    window: deque[_Sample] = field(default_factory=deque)

    def add(self, sample: _Sample) -> None:
        self.num_samples += 1
        if self.num_samples == 1:
            return  # the first sample is left out, as it has one-time work
        if not (self.baseline.is_complete and self.baseline.covers(sample)):
            self.baseline.add(sample)
            return
        self.window.append(sample)
        while self.sum("seconds") - self.window[0].seconds >= WINDOW_SECONDS:
            self.window.popleft()

    def sum(self, name: str) -> float:
        return sum(getattr(sample, name) for sample in self.window)

    def per_step(self, name: str) -> float:
        """Median over the recent samples of the seconds per step in field ``name`` of ``_Sample`` (``busy`` or ``layers``)."""
        return median(getattr(sample, name) / sample.steps for sample in self.window)

    @property
    def ratio(self) -> float:
        """Median over the recent samples of the ratio of busy time to baseline. With a median, a stall of some seconds does not
        count as a slowdown."""
        return median(sample.busy / max(self.baseline.predict(sample), 1e-9) for sample in self.window)


class StageSlowdownDetector:
    """Finds stages of one model that have slowed down since startup, relative to the other stages.

    Args:
        layers: number of layers of each stage; there are at least two stages.
        num_ranks: number of ranks that hold a part of the model.
    """

    def __init__(self, layers: Sequence[int], num_ranks: int):
        self._num_layers, self._num_ranks = list(layers), num_ranks
        self._ranks: dict[int, _Rank] = {}
        self._tokens = [0]  # cumulative number of tokens of steps from ``_first`` on
        self._first = 0
        self.drift: Drift | None = None
        """Latest comparison of the stages' step times with their baselines; None until there has been enough work."""
        self.better_since = math.inf
        """Time, in monotonic seconds, since which some other split of the layers has always been better; infinite if none is
        better."""

    def add_step(self, num_tokens: int) -> None:
        """Record a completed step; all ranks run the same steps in the same order."""
        self._tokens.append(self._tokens[-1] + num_tokens)
        if len(self._tokens) > MAX_KEPT_STEPS:
            self._forget(self._first + MAX_KEPT_STEPS // 2)

    def add_stats(self, ranks: Sequence[WorkerStats], now: float) -> None:
        """Add the latest stats of the ranks.

        Args:
            now: monotonic time in seconds.
        """
        changed = [self._add_rank(stats) for stats in ranks]
        if not any(changed):
            return
        self._forget(min(rank.last.num_steps for rank in self._ranks.values()))
        if len(self._ranks) == self._num_ranks and all(
            rank.sum("seconds") >= MIN_WINDOW_SECONDS for rank in self._ranks.values()
        ):
            self.drift = self._judge()
            self.better_since = min(self.better_since, now) if self.drift.layers else math.inf

    def _add_rank(self, stats: WorkerStats) -> bool:
        """Add a sample of the work of a rank since its last sample. Returns False if that work has too few steps
        (``MIN_SAMPLE_STEPS``)."""
        rank = self._ranks.setdefault(stats.rank, _Rank(stats))
        before, steps = rank.last, stats.num_steps - rank.last.num_steps
        latest = self._first + len(self._tokens) - 1
        if steps < MIN_SAMPLE_STEPS or stats.num_steps > latest:
            return False
        rank.last = stats
        if before.num_steps < self._first:
            return False
        rank.add(
            _Sample(
                seconds=min(stats.when - before.when, MAX_SAMPLE_SECONDS),
                steps=steps,
                tokens=self._tokens[stats.num_steps - self._first] - self._tokens[before.num_steps - self._first],
                busy=stats.busy_time - before.busy_time,
                layers=stats.layer_time - before.layer_time,
            )
        )
        return True

    def _forget(self, num_steps: int) -> None:
        if num_steps > self._first:
            del self._tokens[: num_steps - self._first]
            self._first = num_steps

    def _judge(self) -> Drift:
        stages = [
            max((rank for rank in self._ranks.values() if rank.last.stage == stage), key=lambda rank: rank.ratio)
            for stage in range(len(self._num_layers))
        ]
        ratios = [rank.ratio for rank in stages]
        factors = [
            ratio / median(other for number, other in enumerate(ratios) if number != stage)
            for stage, ratio in enumerate(ratios)
        ]
        slowest = max(range(len(stages)), key=factors.__getitem__)
        was_slow = self.drift is not None and self.drift.slow == slowest
        is_slow = factors[slowest] >= (RECOVERED if was_slow else DRIFTED) and ratios[slowest] >= MIN_OWN_SLOWDOWN
        per_layer = [rank.per_step("layers") / count for rank, count in zip(stages, self._num_layers, strict=True)]
        fixed = [max(0.0, rank.per_step("busy") - rank.per_step("layers")) for rank in stages]
        busiest = max(rank.sum("busy") / rank.sum("seconds") for rank in stages)
        layers, gain = better_split(self._num_layers, per_layer, fixed, bound_by_slowest=busiest >= SLOWEST_STAGE_BUSY)
        return Drift(
            factors=factors,
            slow=slowest if is_slow else None,
            rank=stages[slowest].last.rank if is_slow else None,
            layers=layers if gain >= MIN_GAIN else [],
            gain=gain if gain >= MIN_GAIN else 0.0,
        )


def better_split(
    layers: Sequence[int], per_layer: Sequence[float], fixed: Sequence[float], *, bound_by_slowest: bool
) -> tuple[list[int], float]:
    """Return the split of the layers with the highest throughput, and its gain of throughput over ``layers`` as a fraction.

    Args:
        layers: number of layers of each stage now.
        per_layer: seconds per layer on each stage.
        fixed: seconds of all other work on each stage.
        bound_by_slowest: whether the slowest stage determines the throughput; if not, the sum over all stages does, as for a single
            request.
    """

    def seconds(split: Sequence[int]) -> float:
        stages = [own + count * each for own, count, each in zip(fixed, split, per_layer, strict=True)]
        return max(stages) if bound_by_slowest else sum(stages)

    best = [1] * len(layers)
    for _ in range(sum(layers) - len(layers)):  # each to the cheapest stage, which is optimal: stages are independent
        stage = min(range(len(best)), key=lambda stage: fixed[stage] + (best[stage] + 1) * per_layer[stage])
        best[stage] += 1
    return best, seconds(layers) / max(seconds(best), 1e-9) - 1
