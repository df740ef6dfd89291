"""DraftLengths: how many tokens to draft for each sequence, from measured acceptance and measured times of steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from labinfer.engine.sequence import Sequence

PRIOR = 0.6
"""Part of the drafted tokens that is taken to be right before any was verified."""
PLACES_WEIGHT = 4.0
"""Drafted tokens of a sequence that count as much as what is known of their places."""
KEPT = 0.98
"""Weight of what a place was known for, at each token that is verified there: some 50 of them count."""
KEPT_OF_SEQUENCE = 0.9
"""The same for each draft of a sequence."""
PROBE_STEPS = 32
"""Steps without a draft after which one sequence gets a short one, to see whether drafts have become better."""
MAX_PROBE_STEPS = 512
"""The same where one short draft after the other was wrong: the steps are twice as many each time."""
PROBE_TOKENS = 2
MAX_DRAFTED = 64
"""Tokens drafted in a step at most: more rows are never free, and looking for the best number costs time."""
HOPELESS = 0.02
"""Chance of being right under which no token is drafted."""

LEAST_GAIN = 1.1
"""Tokens a second that drafts have to promise, as a multiple of those without: times and chances are never quite as measured."""

ShapeSeconds = Callable[[int, int], float]
"""Seconds for a round of so many micro-batches, with so many more drafted tokens than are on their way."""
StepSeconds = Callable[[int], float]
"""Seconds until a step that runs so many rows has brought its tokens."""


@dataclass
class DecayedRate:
    """Acceptance rate of drafted tokens, with exponential decay of older ones."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int, kept: float) -> None:
        self.right, self.tried = self.right * kept + right, self.tried * kept + tried

    def estimate(self, prior: float, weight: float = 1.0) -> float:
        """The rate, near ``prior`` as long as little is known.

        Args:
            weight: tokens that count as much as the prior.
        """
        return (self.right + weight * prior) / (self.tried + weight)


@dataclass(kw_only=True)
class DraftLengths:
    """Lengths that promise the most tokens a second.

    A token is worth its chance to be right, which takes those before it to be right: chances of the places, measured over all
    sequences, drawn towards what the sequence itself has shown. Tokens are added, the likeliest first, and as many are taken as
    make the expected tokens of the step, over its seconds with the drafter's, the most. So nothing is drafted where rows cost
    time, as with many sequences, or where the drafts are bad.
    """

    num_places: int
    """Tokens of a draft at most."""
    places: list[DecayedRate] = field(init=False)
    """For each place of a draft, its tokens that were verified with all before them right."""
    _sequences: dict[Sequence, DecayedRate] = field(default_factory=dict)
    _steps_without: int = 0
    _probe_steps: int = PROBE_STEPS
    _num_probes: int = 0
    _probed: Sequence | None = None
    _draft_seconds: float = 0.0  # of a token in the longest draft of a step
    _declined: tuple[frozenset[Sequence], int, int] | None = None
    """A step for which no draft was worth it: for its like none is until something has been learnt."""

    def __post_init__(self) -> None:
        self.places = [DecayedRate() for _ in range(self.num_places)]

    def choose(
        self, limits: dict[Sequence, int], num_others: int, seconds: StepSeconds, num_micro_batches: int = 1
    ) -> dict[Sequence, int]:
        """Lengths of the sequences that are to have a draft, at most those of ``limits``.

        Args:
            num_others: rows of the step beside one for each of these sequences.
            num_micro_batches: steps whose drafts are made while ``seconds`` pass.
        """
        asked = frozenset(limits), num_others, num_micro_batches
        chosen = {} if asked == self._declined else self._best(limits, num_others, seconds, num_micro_batches)
        self._declined = None if chosen else asked
        if chosen:
            self._steps_without = 0
            return chosen
        self._steps_without += 1
        if self._steps_without < self._probe_steps:
            return {}
        self._steps_without = 0
        self._declined = None
        self._draft_seconds *= KEPT  # a drafter that was too slow is measured again some day
        self._probed = list(limits)[
            self._num_probes % len(limits)
        ]  # in turn: one may never have a draft to be verified
        self._num_probes += 1
        return {self._probed: min(PROBE_TOKENS, limits[self._probed])}

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

    def choose_behind(
        self,
        limits: dict[Sequence, int],
        others: Iterable[Sequence],
        seconds: ShapeSeconds,
        drafting_step_seconds: ShapeSeconds,
        count: int,
    ) -> dict[Sequence, int]:
        """Lengths of chunks of drafted tokens alone, behind the chunks that are on their way.

        They come to something if all that is on its way is right. A round brings the tokens that are expected of these chunks, too.
        On the rank that drafts, drafts and steps take turns, so that a round lasts at least as long as all of both.

        Args:
            limits: sequences that may have one, and its longest.
            others: sequences whose tokens are on their way, too.
            seconds: of the whole round.
            drafting_step_seconds: of one of its steps on the rank that drafts.
            count: micro-batches on their way.
        """
        # Tokens of the drafts on their way, each of which is taken to be as long as the longest: the drafter runs once for each.
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
        """The chance that all tokens of a sequence that are on their way are right, and how many tokens they bring."""
        rate, chance, expected = self._rate(sequence), 1.0, 1.0
        for place in sequence.draft_positions:
            chance *= rate.estimate(self.places[place].estimate(PRIOR), PLACES_WEIGHT)
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
        """Lengths with which a round brings the most tokens a second.

        Args:
            chances: that all before a sequence's draft is right.
            limits: sequences that may have a draft, and its longest.
            expected: tokens that a round brings without.
            seconds_without: of this round.
            seconds: of one with so many drafted tokens, and so many of them in the longest draft.
        """
        priors = [place.estimate(PRIOR) for place in self.places]
        order = list(limits)
        likeliest = [
            (-chances[sequence] * self._rate(sequence).estimate(priors[0], PLACES_WEIGHT), index, 0)
            for index, sequence in enumerate(order)
        ]
        heapq.heapify(likeliest)
        best_rate = LEAST_GAIN * expected / seconds_without
        taken: list[int] = []  # places in ``order``, as tokens were added
        num_best = longest = 0
        while likeliest and len(taken) < MAX_DRAFTED and -likeliest[0][0] >= HOPELESS:
            chance, index, place = heapq.heappop(likeliest)
            taken.append(index)
            expected -= chance
            longest = max(longest, place + 1)
            rate = expected / seconds(len(taken), longest)
            if rate > best_rate:
                best_rate, num_best = rate, len(taken)
            if place + 1 < min(limits[order[index]], self.num_places):
                further = self._rate(order[index]).estimate(priors[place + 1], PLACES_WEIGHT)
                heapq.heappush(likeliest, (chance * further, index, place + 1))
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
        """Time that the drafter took for a step, for drafts of up to so many tokens."""
        self._declined = None
        self._draft_seconds += (seconds / longest - self._draft_seconds) * (0.1 if self._draft_seconds else 1.0)

    def add_verified(self, sequence: Sequence, places: Series[int], num_right: int) -> None:
        """Drafted tokens at these places in their drafts, of which the first ``num_right`` were right."""
        self._declined = None
        if num_right:
            self._probe_steps = PROBE_STEPS
        elif sequence is self._probed:
            self._probe_steps = min(2 * self._probe_steps, MAX_PROBE_STEPS)
        self._probed = None if sequence is self._probed else self._probed
        num_tried = min(len(places), num_right + 1)
        for index, place in enumerate(places[:num_tried]):
            self.places[place].add(int(index < num_right), 1, KEPT)
        self._rate(sequence).add(num_right, num_tried, KEPT_OF_SEQUENCE)

    def forget(self, sequences: list[Sequence]) -> None:
        """Forget sequences that have ended."""
        for sequence in sequences:
            self._sequences.pop(sequence, None)
            self._probed = None if sequence is self._probed else self._probed
