"""MicroBatchCount: number of micro-batches in flight, chosen by measured step times."""

from __future__ import annotations

from functools import cache

from labinfer.base.rank_stats import StepTimes

WORTH_IT = 0.95
"""The number of micro-batches with the shortest predicted round is chosen only if that round takes at most this
fraction of the time with one micro-batch per stage, because measurements are noisy."""


class MicroBatchCount:
    """Chooses the number of micro-batches that minimizes the time of a round (one token for every sequence).

    With m micro-batches of n/m sequences, a round takes as long as one micro-batch through all stages and links, and at
    least as long as the slowest stage takes for all m. More micro-batches hide link latency and the work of other
    stages. But if a step takes nearly as long for few sequences as for many, the slowest stage pays for each
    micro-batch. A single stage always has one: it has nothing to hide, and a wrong step time would split its batches.

    Args:
        times: measured step times; None without measurements, which makes the count the number of stages.
        fixed: fixed count; 0 to choose it.
        drafting_stage: stage of the rank that drafts; None if that is a spare rank.
    """

    def __init__(self, num_stages: int, times: StepTimes | None = None, fixed: int = 0, drafting_stage: int | None = 0):
        self._num_stages, self._times, self._fixed = num_stages, times, fixed
        self._drafting_stage = drafting_stage
        self._shortest = cache(self._find_shortest)

    def best(self, num_decoding: int, has_prompts: bool) -> int:
        """Number of micro-batches for ``num_decoding`` decoding sequences, with or without prompts beside them."""
        if self._fixed or self._times is None or num_decoding == 0 or self._num_stages == 1:
            return self._fixed or self._num_stages
        count = self._shortest(num_decoding)
        # The time of a prompt's chunks is proportional to their tokens, and they can be pipelined: every stage can run one.
        return max(count, self._num_stages) if has_prompts else count

    def round_time(self, count: int, num_decoding: int) -> float:
        """Predicted seconds of a round: one step of each of ``count`` micro-batches, without drafts."""
        return self.draft_time(count, num_decoding, 0)

    def draft_time(self, count: int, num_decoding: int, num_drafted: float) -> float:
        """Predicted seconds of a round of ``count`` micro-batches that each run ``num_drafted`` drafted tokens, too."""
        steps = [self._step_time(stage, count, num_decoding, num_drafted) for stage in range(self._num_stages)]
        through = sum(steps) + self._num_stages * self._times.hop
        return through if count == 1 else max(through, count * max(steps))

    def drafting_step_time(self, count: int, num_decoding: int, num_drafted: float) -> float:
        """Predicted seconds of a step, on the rank that drafts, in a round of ``count`` micro-batches with
        ``num_drafted`` drafted tokens each. That rank drafts before its step; 0 if a spare rank drafts."""
        if self._drafting_stage is None:
            return 0.0
        return self._step_time(self._drafting_stage, count, num_decoding, num_drafted)

    def _step_time(self, stage: int, count: int, num_decoding: int, num_drafted: float) -> float:
        size, times = num_decoding / count, self._times
        return times.at(stage, size, alone=count == 1) + times.drafted(stage, size, num_drafted)

    def _find_shortest(self, num_decoding: int) -> int:
        counts = range(1, min(2 * self._num_stages, num_decoding) + 1)
        best = min(counts, key=lambda count: self.round_time(count, num_decoding))
        usual = min(self._num_stages, num_decoding)
        promised = self.round_time(best, num_decoding) / self.round_time(usual, num_decoding)
        return best if promised < WORTH_IT else self._num_stages
