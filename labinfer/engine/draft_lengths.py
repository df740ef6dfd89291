"""DraftLengths: how many tokens to draft for each sequence, from measured acceptance rates and step times."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from labinfer.engine.sequence import Sequence

PRIOR = 0.6
"""Assumed acceptance rate before any drafted token is verified."""
POSITION_WEIGHT = 4.0
"""Weight of the acceptance rate of a draft position (over all sequences) as the prior of a sequence's own rate, in
drafted tokens."""
KEPT = 0.98
"""Decay of a draft position's acceptance rate per verified token: about the last 50 tokens count."""
KEPT_OF_SEQUENCE = 0.9
"""Decay of a sequence's acceptance rate per verified draft."""
RETRY_STEPS = 32
"""Steps without drafts after which drafting is retried: one sequence gets a short draft, in case acceptance has improved."""
MAX_RETRY_STEPS = 512
"""Upper bound of the interval between retries, which doubles after each retry whose draft is rejected."""
RETRY_TOKENS = 2
MAX_DRAFTED = 64
"""Maximum number of drafted tokens in a step: more rows always cost time, and so does the search for the best number."""
HOPELESS = 0.02
"""Acceptance probability below which no token is drafted."""

LEAST_GAIN = 1.1
"""Minimum predicted speed-up of drafting (tokens per second, relative to no drafts); above 1, as predictions are inexact."""

ShapeSeconds = Callable[[int, int], float]
"""``(num_micro_batches, num_drafted)`` → predicted seconds of a round (one step of every micro-batch) with ``num_drafted`` more
drafted tokens than are in flight."""
StepSeconds = Callable[[int], float]
"""``rows`` → predicted seconds until the result of a step with ``rows`` tokens returns."""


@dataclass
class DecayedRate:
    """Acceptance rate of drafted tokens, with exponential decay of older ones."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int, kept: float) -> None:
        self.right, self.tried = self.right * kept + right, self.tried * kept + tried

    def estimate(self, prior: float, weight: float = 1.0) -> float:
        """Acceptance rate; close to ``prior`` while there is little data.

        Args:
            weight: weight of ``prior``, in tokens.
        """
        return (self.right + weight * prior) / (self.tried + weight)


@dataclass(kw_only=True)
class DraftLengths:
    """Chooses draft lengths that maximize the expected tokens per second.

    A drafted token counts with the probability that it and all tokens before it in its draft are accepted. The
    probability combines the acceptance rate of its position, over all sequences, with that of its sequence. Tokens are
    added in order of falling probability, up to the number that maximizes the expected tokens of the step over the
    seconds of step and drafter. So nothing is drafted if rows are expensive, as with many sequences, or if acceptance
    is low.
    """

    max_length: int
    """Maximum draft length."""
    positions: list[DecayedRate] = field(init=False)
    """Acceptance rate of each draft position, given that all tokens before it were accepted."""
    _sequences: dict[Sequence, DecayedRate] = field(default_factory=dict)
    _steps_without: int = 0
    _retry_steps: int = RETRY_STEPS
    _num_retries: int = 0
    _retried: Sequence | None = None
    _draft_seconds: float = 0.0  # drafter's time for a step, per token of its longest draft
    _declined: tuple[frozenset[Sequence], int, int] | None = None
    """Arguments of the last ``choose`` that found no draft worthwhile: until new measurements, equal arguments get no drafts."""

    def __post_init__(self) -> None:
        self.positions = [DecayedRate() for _ in range(self.max_length)]

    def choose(
        self, limits: dict[Sequence, int], num_others: int, seconds: StepSeconds, num_micro_batches: int = 1
    ) -> dict[Sequence, int]:
        """Choose the draft length of each sequence, at most ``limits[sequence]``. Sequences without a draft are left out.

        Args:
            num_others: number of the step's tokens besides one token of each sequence in ``limits``.
            seconds: predicts the seconds of a step from its number of tokens.
            num_micro_batches: number of steps in a round; the drafter drafts for each of them.
        """
        asked = frozenset(limits), num_others, num_micro_batches
        chosen = {} if asked == self._declined else self._best(limits, num_others, seconds, num_micro_batches)
        self._declined = None if chosen else asked
        if chosen:
            self._steps_without = 0
            return chosen
        self._steps_without += 1
        if self._steps_without < self._retry_steps:
            return {}
        self._steps_without = 0
        self._declined = None
        self._draft_seconds *= KEPT  # so that a drafter that was too slow is measured again eventually
        self._retried = list(limits)[
            self._num_retries % len(limits)
        ]  # round-robin: some sequences never have a draft to verify
        self._num_retries += 1
        return {self._retried: min(RETRY_TOKENS, limits[self._retried])}

    def _best(
        self, limits: dict[Sequence, int], num_others: int, seconds: StepSeconds, num_micro_batches: int
    ) -> dict[Sequence, int]:
        rows = len(limits) + num_others
        return self._fill(
            dict.fromkeys(limits, 1.0),
            limits,
            rows,
            seconds(rows),
            lambda count, longest: seconds(rows + count) + num_micro_batches * longest * self._draft_seconds,
        )

    def choose_further_chunks(
        self,
        limits: dict[Sequence, int],
        others: Iterable[Sequence],
        seconds: ShapeSeconds,
        drafting_step_seconds: ShapeSeconds,
        count: int,
    ) -> dict[Sequence, int]:
        """Choose lengths of further draft chunks, after the chunks that are in flight.

        A further chunk counts only if all tokens in flight before it are accepted. The expected tokens of a round
        include those of the chunks in flight. The rank that drafts alternates between drafting and its steps, so a
        round takes at least the sum of both.

        Args:
            limits: maximum length of a chunk for each sequence that may get one.
            others: other sequences with tokens in flight.
            seconds: predicts the seconds of the whole round.
            drafting_step_seconds: predicts the seconds of one step of the round on the rank that drafts.
            count: number of micro-batches in flight.
        """
        # Every draft in flight counts as long as the longest one: the drafter runs once per token of the longest draft.
        longest_before = 1 + max((max(s.draft_positions, default=-1) for s in [*limits, *others]), default=-1)
        chances, expected = {}, 0.0
        for sequence in [*limits, *others]:
            chances[sequence], tokens = self._expect(sequence)
            expected += tokens

        def round_seconds(num_micro_batches: int, num_drafted: int, longest: int) -> float:
            first, all_drafts = (n * self._draft_seconds for n in (longest_before, count * longest_before + longest))
            steps = num_micro_batches * drafting_step_seconds(num_micro_batches, num_drafted)
            return max(seconds(num_micro_batches, num_drafted) + first, all_drafts + steps)

        return self._fill(
            chances, limits, expected, round_seconds(count, 0, 0), lambda *drafts: round_seconds(count + 1, *drafts)
        )

    def _expect(self, sequence: Sequence) -> tuple[float, float]:
        """Probability that all tokens in flight of a sequence are accepted, and the expected number of tokens that they
        yield."""
        rate, chance, expected = self._rate(sequence), 1.0, 1.0
        for position in sequence.draft_positions:
            chance *= rate.estimate(self.positions[position].estimate(PRIOR), POSITION_WEIGHT)
            expected += chance
        return chance, expected

    def _fill(
        self,
        chances: dict[Sequence, float],
        limits: dict[Sequence, int],
        expected: float,
        seconds_without: float,
        seconds: Callable[[int, int], float],
    ) -> dict[Sequence, int]:
        """Choose the draft lengths that maximize a round's expected tokens per second.

        Args:
            chances: probability for each sequence that all tokens before its draft are accepted.
            limits: maximum draft length for each sequence that may have a draft.
            expected: expected tokens of the round without drafts.
            seconds_without: seconds of the round without drafts.
            seconds: (number of drafted tokens, length of the longest draft) → predicted seconds of the round.
        """
        priors = [rate.estimate(PRIOR) for rate in self.positions]
        order = list(limits)
        likeliest = [
            (-chances[sequence] * self._rate(sequence).estimate(priors[0], POSITION_WEIGHT), index, 0)
            for index, sequence in enumerate(order)
        ]
        heapq.heapify(likeliest)
        best_rate = LEAST_GAIN * expected / seconds_without
        taken: list[int] = []  # indices into ``order``, one per added token
        num_best = longest = 0
        while likeliest and len(taken) < MAX_DRAFTED and -likeliest[0][0] >= HOPELESS:
            chance, index, position = heapq.heappop(likeliest)
            taken.append(index)
            expected -= chance
            longest = max(longest, position + 1)
            rate = expected / seconds(len(taken), longest)
            if rate > best_rate:
                best_rate, num_best = rate, len(taken)
            if position + 1 < min(limits[order[index]], self.max_length):
                further = self._rate(order[index]).estimate(priors[position + 1], POSITION_WEIGHT)
                heapq.heappush(likeliest, (chance * further, index, position + 1))
        lengths: dict[Sequence, int] = {}
        for index in taken[:num_best]:
            lengths[order[index]] = lengths.get(order[index], 0) + 1
        return lengths

    def _rate(self, sequence: Sequence) -> DecayedRate:
        rate = self._sequences.get(sequence)
        if rate is None:
            rate = self._sequences[sequence] = DecayedRate()
        return rate

    def add_draft_time(self, seconds: float, longest: int) -> None:
        """Record the drafter's ``seconds`` for a step whose longest draft has ``longest`` tokens."""
        self._declined = None
        self._draft_seconds += (seconds / longest - self._draft_seconds) * (0.1 if self._draft_seconds else 1.0)

    def add_verified(self, sequence: Sequence, positions: Series[int], num_accepted: int) -> None:
        """Record the verification of a draft: its first ``num_accepted`` tokens were accepted, and the next one, if
        any, was rejected.

        Args:
            positions: positions of the verified tokens in their drafts.
        """
        self._declined = None
        if num_accepted:
            self._retry_steps = RETRY_STEPS
        elif sequence is self._retried:
            self._retry_steps = min(2 * self._retry_steps, MAX_RETRY_STEPS)
        self._retried = None if sequence is self._retried else self._retried
        num_tried = min(len(positions), num_accepted + 1)
        for index, position in enumerate(positions[:num_tried]):
            self.positions[position].add(int(index < num_accepted), 1, KEPT)
        self._rate(sequence).add(num_accepted, num_tried, KEPT_OF_SEQUENCE)

    def forget(self, sequences: list[Sequence]) -> None:
        """Drop the acceptance rates of sequences that have ended."""
        for sequence in sequences:
            self._sequences.pop(sequence, None)
            self._retried = None if sequence is self._retried else self._retried
