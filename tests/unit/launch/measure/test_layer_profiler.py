"""Steps are repeated for as long as it takes to know their seconds; of slow ones two runs do, unless the first took longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from labinfer.base.cache_sizes import CacheSizes
from labinfer.launch.measure.layer_profiler import BATCH_SECONDS, NUM_BATCHES, LayerProfiler


class Steps:
    """Steps that take so many seconds each, the last of these for all that follow; a quota timer for them, and sums that are such steps."""

    def __init__(self, seconds: Sequence[float]):
        self._seconds, self.num_run, self._passed = list(seconds), 0, 0.0

    def run(self, partial: torch.Tensor) -> torch.Tensor:
        self._passed += self._seconds[min(self.num_run, len(self._seconds) - 1)]
        self.num_run += 1
        return partial

    def time(self, work: Callable[[], object]) -> float:
        begin = self._passed
        work()
        return self._passed - begin


def time_steps(steps: Steps, others: Sequence[Sequence[float]] = ()) -> float:
    """Seconds of a step on one rank.

    Args:
        others: of each other rank, seconds of its first two runs.
    """
    comm = SimpleNamespace(size=1 + len(others), all_gather=lambda own: [own, *map(torch.tensor, others)])
    timer = LayerProfiler(
        comm=comm,
        sum_ranks=steps.run,
        runner=None,
        device=torch.device("cpu"),
        sizes=CacheSizes(num_blocks=1, max_model_len=1),
        vocab_size=1,
        quota_timer=steps,
    )
    return timer.time_sum(1, 1, torch.float32)


@pytest.mark.parametrize(
    ("seconds", "num_run", "measured"),
    [
        ([2.0, 2.0], 2, 2.0),
        ([2.0, 2.2], 2, 2.1),
        ([3.0, 2.0, 2.4], 3, 2.2),  # the first run was no step like the others
    ],
)
def test_slow_steps_are_run_as_often_as_they_have_to(seconds, num_run, measured):
    steps = Steps(seconds)
    assert time_steps(steps) == pytest.approx(measured)
    assert steps.num_run == num_run


def test_quick_steps_fill_batches_of_which_the_median_counts():
    steps = Steps([1.0, 0.001])
    assert time_steps(steps) == pytest.approx(0.001)
    assert steps.num_run == 2 + NUM_BATCHES * round(BATCH_SECONDS / 0.001)


@pytest.mark.parametrize("own", [[0.2, 0.2], [0.2, 0.4], [0.4, 0.4], [0.4, 0.2], [0.6, 0.4]])
@pytest.mark.parametrize("other", [[0.2, 0.2], [0.2, 0.4], [0.4, 0.4], [0.4, 0.2], [0.6, 0.4]])
def test_ranks_of_a_stage_run_a_step_equally_often(own, other):
    here, there = Steps(own), Steps(other)
    time_steps(here, [other])
    time_steps(there, [own])
    assert here.num_run == there.num_run
