"""RoundOverheads: what rounds really take beyond the times of a start."""

from __future__ import annotations

from collections import deque

NUM_KEPT_ROUNDS = 15
"""Rounds of like sizes of which the lower quartile counts: the first of a size may be captured, and others run on the machine, too."""
MIN_ROUNDS = 3
"""Rounds before which nothing is said of their size."""
PLAIN_EVERY = 64
"""One in so many rounds with drafts has none, to be compared with, if none came about by itself …"""
FIRST_PLAIN_EVERY = 4
"""… or in so many, as long as there is nothing to compare with."""
FORGET_AFTER = 1024
"""Rounds after which drafts of a length that was not tried since may be worth trying again."""


class RoundOverheads:
    """Seconds of rounds beyond those of the workers' steps, as a start has timed them.

    A round also takes scheduling, messages, whatever is done with its tokens, and what a draft model costs the model beside its own
    time: some of it for each step, some for each drafted token, and as much as a step where steps are short. It is learnt from rounds
    with about as many sequences and drafted tokens, up to a factor of 2. Longer drafts than were seen are taken to cost what
    shorter ones do, until they are seen.

    Args:
        num_plain: rounds without drafts, one after the other, of which the last is a fair one.
    """

    def __init__(self, num_plain: int = 1):
        self._num_plain = num_plain
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._quartiles: dict[tuple[int, int], float] = {}
        self._num_asked: dict[int, int] = {}
        self._last_seen: dict[tuple[int, int], int] = {}

    def add(self, num_decodes: int, num_drafted: int, seconds: float) -> None:
        """A round of so many sequences, of whose micro-batches this one had so many drafted tokens, took so much longer."""
        size = num_decodes.bit_length(), num_drafted.bit_length()
        seen = self._seconds.setdefault(size, deque(maxlen=NUM_KEPT_ROUNDS))
        seen.append(seconds)
        self._last_seen[size] = self._num_asked.get(size[0], 0)
        if len(seen) >= MIN_ROUNDS:
            self._quartiles[size] = sorted(seen)[(len(seen) - 1) // 4]

    def seconds(self, num_decodes: int, num_drafted: int) -> float:
        """Seconds that such a round takes longer; 0 as long as there is nothing to compare it with."""
        decodes, drafted = num_decodes.bit_length(), num_drafted.bit_length()
        if (decodes, 0) not in self._quartiles:
            return 0.0
        while (decodes, drafted) not in self._quartiles:
            drafted -= 1
        return self._quartiles[decodes, drafted]

    def needs_baseline_round(self, num_decodes: int) -> bool:
        """Whether a round is to have no drafts, so that others can be compared with it; to be asked once for each that may have some."""
        decodes = num_decodes.bit_length()
        asked = self._num_asked[decodes] = self._num_asked.get(decodes, 0) + 1
        if asked % FORGET_AFTER == 0:
            self._forget(decodes)
        every = PLAIN_EVERY if (decodes, 0) in self._quartiles else FIRST_PLAIN_EVERY
        if -asked % every >= self._num_plain or asked - self._last_seen.get((decodes, 0), -every) < every // 2:
            return False
        return any(size[0] == decodes and size[1] for size in self._last_seen)

    def _forget(self, decodes: int) -> None:
        """Forget drafts of lengths that were not tried for long."""
        for size, asked in [*self._last_seen.items()]:
            if size[0] == decodes and size[1] and self._num_asked[decodes] - asked >= FORGET_AFTER:
                del self._last_seen[size], self._seconds[size]
                self._quartiles.pop(size, None)
