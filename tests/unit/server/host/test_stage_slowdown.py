"""StageSlowdownDetector: which stage is named on made-up series of what ranks tell, and the splits of layers that are better."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from labinfer.base.rank_stats import WorkerStats
from labinfer.server.host.stage_slowdown import StageSlowdownDetector, better_split

LAYER, FIXED = 1e-3, 5e-4
"""Seconds of a layer and of everything else in a step of one token; a token more takes a tenth more."""


class Pipeline:
    """Ranks that tell of their steps once a second.

    Args:
        layers: of each stage.
        tp: ranks of a stage.
        growth: by rank, how much longer each token more makes a step.
    """

    def __init__(self, layers: list[int], tp: int = 1, seed: int = 0, growth: dict[int, float] = {}):  # noqa: B006
        self._growth = growth
        self.watch = StageSlowdownDetector(layers, tp * len(layers))
        self._layers, self._tp, self._random = layers, tp, random.Random(seed)
        self._counters = {rank: [0, 0.0, 0.0] for rank in range(tp * len(layers))}
        self.now = 0.0

    def run(self, seconds: int, slow: dict[int, float] = {}, tokens: Callable[[], int] = lambda: 8) -> list[int | None]:  # noqa: B006
        """So many seconds of work, with factors of slow ranks. The stages that were named, second by second."""
        named = []
        for _ in range(seconds):
            used = 0.0
            while used < 0.95:
                count = tokens()
                self.watch.add_step(count)
                noise = self._random.uniform(0.9, 1.1)
                times = [self._add_step(rank, count, noise * slow.get(rank, 1.0)) for rank in self._counters]
                used += max(times)
            self.now += 1.0
            self.watch.add_stats([self._stats(rank) for rank in self._counters], self.now)
            named.append(self.watch.drift.slow if self.watch.drift else None)
        return named

    def _add_step(self, rank: int, tokens: int, factor: float) -> float:
        each = factor * (1 + self._growth.get(rank, 0.1) * (tokens - 1))
        layers = each * LAYER * self._layers[rank // self._tp]
        counters = self._counters[rank]
        counters[0] += 1
        counters[1] += layers + each * FIXED
        counters[2] += layers
        return layers + each * FIXED

    def _stats(self, rank: int) -> WorkerStats:
        steps, busy, layers = self._counters[rank]
        return WorkerStats(
            rank=rank,
            stage=rank // self._tp,
            tp_rank=rank % self._tp,
            num_steps=steps,
            busy_time=busy,
            layer_time=layers,
            peak_memory=0,
            private_memory=0,
            weight_bytes_read=0,
            num_threads=1,
            cpus="0",
            when=1000.0 * rank + self.now,
        )


def test_steady_stages_are_not_named():
    pipeline = Pipeline([3, 3])
    assert set(pipeline.run(60)) == {None}
    assert pipeline.watch.drift.factors == pytest.approx([1, 1], abs=0.1) and not pipeline.watch.drift.layers


def test_stage_that_becomes_slower_is_named_within_thirty_seconds_with_a_better_split():
    pipeline = Pipeline([3, 3])
    pipeline.run(30)
    named = pipeline.run(30, {1: 2.0})
    assert named[-1] == 1 and named.index(1) < 12
    drift = pipeline.watch.drift
    assert drift.factors[1] == pytest.approx(2, rel=0.1) and drift.rank == 1
    assert drift.layers == [4, 2] and drift.gain == pytest.approx(0.4, abs=0.1)
    since = pipeline.watch.better_since
    assert 30 < since < 42
    pipeline.run(30, {1: 2.0})
    assert pipeline.watch.better_since == since
    assert pipeline.run(25)[-1] is None and pipeline.watch.better_since > pipeline.now


def test_stages_that_all_become_slower_are_not_named():
    pipeline = Pipeline([3, 3])
    pipeline.run(30)
    assert set(pipeline.run(40, {0: 3.0, 1: 3.0})) == {None}


def test_other_requests_are_not_taken_for_slowness():
    mixed = random.Random(1)
    pipeline = Pipeline([4, 2])
    pipeline.run(30, tokens=lambda: mixed.choice([1, 2, 40]))
    assert set(pipeline.run(30, tokens=lambda: 64)) == {None}
    assert set(pipeline.run(30, tokens=lambda: 1)) == {None}
    assert pipeline.run(30, {0: 2.0}, tokens=lambda: 64)[-1] == 0


def test_stage_is_not_slow_because_another_has_become_faster():
    pipeline = Pipeline([3, 3])
    pipeline.run(30, {1: 2.0})
    assert set(pipeline.run(30)) == {None}
    assert not pipeline.watch.drift.layers


def test_short_disturbance_is_not_named():
    pipeline = Pipeline([3, 3, 3])
    pipeline.run(30)
    pipeline.run(2, {2: 50.0})
    assert set(pipeline.run(20)) == {None}


def test_slow_rank_among_others_of_its_stage_is_named():
    pipeline = Pipeline([3, 3], tp=2)
    pipeline.run(30)
    assert pipeline.run(20, {3: 2.0})[-1] == 1
    assert pipeline.watch.drift.rank == 3


def test_nothing_is_said_without_work():
    pipeline = Pipeline([3, 3])
    for _ in range(100):
        pipeline.now += 1
        pipeline.watch.add_stats([pipeline._stats(rank) for rank in (0, 1)], pipeline.now)
    assert pipeline.watch.drift is None


def test_better_split_is_the_best_of_all():
    choose = random.Random(2)
    for _ in range(300):
        size, total = choose.randint(2, 4), choose.randint(4, 9)
        per_layer = [choose.uniform(0.1, 3) for _ in range(size)]
        fixed = [choose.uniform(0, 2) for _ in range(size)]
        splits = [split for split in itertools.product(range(1, total), repeat=size) if sum(split) == total]
        present = choose.choice(splits)

        def slowest(split, per_layer=per_layer, fixed=fixed):
            return max(own + each * count for own, each, count in zip(fixed, per_layer, split, strict=True))

        split, gain = better_split(present, per_layer, fixed, bound_by_slowest=True)
        assert slowest(split) == pytest.approx(min(map(slowest, splits))) and sum(split) == total
        assert gain == pytest.approx(slowest(present) / slowest(split) - 1)


def test_load_that_was_not_seen_at_the_start_is_learned():
    """A machine whose steps grow with their tokens beside one whose steps hardly do, as one computes and one reads."""
    pipeline = Pipeline([4, 4], growth={1: 0.002})
    pipeline.run(30, tokens=lambda: 64)
    named = pipeline.run(30, tokens=lambda: 1) + pipeline.run(20, tokens=lambda: 32)
    assert set(named) == {None}
    assert pipeline.run(30, slow={1: 2.5}, tokens=lambda: 1)[-1] == 1
