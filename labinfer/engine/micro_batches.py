"""MicroBatchCount: how many are in flight at once, from measured step times."""

from __future__ import annotations

from functools import cache

from labinfer.base.rank_stats import StepTimes

WORTH_IT = 0.95
"""Another number than that of the stages must promise a round at least this much shorter: measured times scatter."""


class MicroBatchCount:
    """The number of micro-batches with which a round, one token for every sequence, is shortest.

    With m micro-batches of n/m sequences a round takes as long as one of them needs through all stages and hops, and at
    least as long as the slowest stage needs for all m. More micro-batches hide hops and other stages' work; but where a
    step takes nearly as long for a few sequences as for many, the slowest stage pays for each. One stage has one: there is
    nothing to hide, and a time that was measured too long would split its batches.

    Args:
        times: None where nothing was measured: it is always as many as there are stages.
        fixed: always this many, if not 0.
        drafting_stage: the stage of the rank that drafts; None where that is a spare rank.
    """

    def __init__(self, num_stages: int, times: StepTimes | None = None, fixed: int = 0, drafting_stage: int | None = 0):
        self._num_stages, self._times, self._fixed = num_stages, times, fixed
        self._drafting_stage = drafting_stage
        self._shortest = cache(self._find_shortest)

    def best(self, num_decoding: int, has_prompts: bool) -> int:
        """Number of micro-batches for so many decoding sequences, with or without prompts beside them."""
        if self._fixed or self._times is None or num_decoding == 0 or self._num_stages == 1:
            return self._fixed or self._num_stages
        count = self._shortest(num_decoding)
        # A prompt's chunks cost by their tokens and are one behind the other: every stage can have one.
        return max(count, self._num_stages) if has_prompts else count

    def round_time(self, count: int, num_decoding: int) -> float:
        """Seconds of a round."""
        return self.draft_time(count, num_decoding, 0)

    def draft_time(self, count: int, num_decoding: int, num_drafted: float) -> float:
        """Seconds of a round in which each of the micro-batches runs so many drafted tokens, too."""
        steps = [self._step_time(stage, count, num_decoding, num_drafted) for stage in range(self._num_stages)]
        through = sum(steps) + self._num_stages * self._times.hop
        return through if count == 1 else max(through, count * max(steps))

    def drafting_step_time(self, count: int, num_decoding: int, num_drafted: float) -> float:
        """Seconds of one of this round's steps on the rank that drafts, which does so before the step; 0 on a spare rank."""
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
