"""RoundOverheads: learned overhead of rounds (one step of every micro-batch) beyond the step times measured at
startup."""

from __future__ import annotations

from collections import deque

NUM_KEPT_ROUNDS = 15
"""Recent rounds kept per size class (see ``RoundOverheads``). Their lower quartile is the estimate, as step capture and
other processes cause outliers."""
MIN_ROUNDS = 3
"""Minimum samples for an overhead estimate. Samples are grouped by batch size and number of drafted tokens
(``RoundOverheads``)."""
BASELINE_EVERY = 64
"""Interval, in rounds, of baseline rounds, in which drafting is suppressed. No round is suppressed if one without drafts has occurred by itself."""
FIRST_BASELINE_EVERY = 4
"""Interval, in rounds, of attempts to get a first baseline round without drafts."""
FORGET_AFTER = 1024
"""Rounds after which the overhead estimate of an untried draft length is dropped, so that the length is tried again."""


class RoundOverheads:
    """Learns the overhead of rounds: the time that they take beyond the workers' step times, which were measured at
    startup. In a round every micro-batch in flight runs one step.

    Causes of overhead are scheduling, messages, the handling of tokens, and steps that are slower while a draft model
    runs. Part of the overhead is per step and part per drafted token; with short steps it can equal the step time.
    Rounds whose numbers of sequences and of drafted tokens agree within a factor of 2 form a size class and share an
    estimate. A number of drafted tokens without an estimate uses that of the next smaller number.

    Args:
        num_baseline: number of consecutive rounds without drafts for a baseline; only the last one is representative.
    """

    def __init__(self, num_baseline: int = 1):
        self._num_baseline = num_baseline
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._quartiles: dict[tuple[int, int], float] = {}
        self._num_asked: dict[int, int] = {}
        self._last_seen: dict[tuple[int, int], int] = {}

    def add(self, num_decodes: int, num_drafted: int, seconds: float) -> None:
        """Record the overhead of a round of ``num_decodes`` sequences with ``num_drafted`` drafted tokens per
        micro-batch."""
        size = num_decodes.bit_length(), num_drafted.bit_length()
        seen = self._seconds.setdefault(size, deque(maxlen=NUM_KEPT_ROUNDS))
        seen.append(seconds)
        self._last_seen[size] = self._num_asked.get(size[0], 0)
        if len(seen) >= MIN_ROUNDS:
            self._quartiles[size] = sorted(seen)[(len(seen) - 1) // 4]

    def seconds(self, num_decodes: int, num_drafted: int) -> float:
        """Estimated overhead, in seconds, of a round of ``num_decodes`` sequences with ``num_drafted`` drafted tokens
        per micro-batch; 0 without a baseline."""
        decodes, drafted = num_decodes.bit_length(), num_drafted.bit_length()
        if (decodes, 0) not in self._quartiles:
            return 0.0
        while (decodes, drafted) not in self._quartiles:
            drafted -= 1
        return self._quartiles[decodes, drafted]

    def needs_baseline_round(self, num_decodes: int) -> bool:
        """Whether the next round should have no drafts, as a baseline. Call it once for each round that may have drafts."""
        decodes = num_decodes.bit_length()
        asked = self._num_asked[decodes] = self._num_asked.get(decodes, 0) + 1
        if asked % FORGET_AFTER == 0:
            self._forget(decodes)
        every = BASELINE_EVERY if (decodes, 0) in self._quartiles else FIRST_BASELINE_EVERY
        if -asked % every >= self._num_baseline or asked - self._last_seen.get((decodes, 0), -every) < every // 2:
            return False
        return any(size[0] == decodes and size[1] for size in self._last_seen)

    def _forget(self, decodes: int) -> None:
        """Drop overhead estimates of draft lengths that were not tried for ``FORGET_AFTER`` rounds."""
        for size, asked in [*self._last_seen.items()]:
            if size[0] == decodes and size[1] and self._num_asked[decodes] - asked >= FORGET_AFTER:
                del self._last_seen[size], self._seconds[size]
                self._quartiles.pop(size, None)
