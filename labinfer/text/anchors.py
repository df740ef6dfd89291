"""Anchors of regions: the texts and patterns with which a part of a reply begins and ends, in text that still comes in.

An anchor says where it matches, and from where on the text could still become a match when more of it comes. That must be
held back, or what is found would depend on how the text was cut into pieces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from labinfer.text.patterns import MAX_MATCH, beginnings, check_pattern


@dataclass(frozen=True)
class Match:
    """A match in a text, from ``begin`` to ``end``."""

    begin: int
    end: int
    captures: dict[str, str]
    """Texts that the pattern's named groups have matched."""


class Anchor(Protocol):
    """The beginning or the end of regions."""

    def find(self, text: str, begin: int, end: int) -> Match | None:
        """The first match within ``text[begin:end]``."""
        ...

    def pending(self, text: str, begin: int, end: int) -> int:
        """Position from which ``text[begin:end]`` may be the beginning of a match, or of a longer one; ``end`` if nowhere."""
        ...


class LiteralAnchor:
    """One of several texts; the longest where several begin at one place."""

    def __init__(self, literals: list[str]):
        self.literals = literals
        self._pattern = re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))))

    def find(self, text: str, begin: int, end: int) -> Match | None:
        match = self._pattern.search(text, begin, end)
        return Match(match.start(), match.end(), {}) if match else None

    def pending(self, text: str, begin: int, end: int) -> int:
        tail = text[max(begin, end - max(map(len, self.literals)) + 1) : end]
        return end - max(overlap(tail, literal) for literal in self.literals)


class PatternAnchor:
    """A regular expression, in which the dot matches line feeds, too.

    A lookahead, with which only an alternative may end, is text like other where the beginning of a match is looked for.

    Raises:
        ValueError: the pattern is broken, may take long, or has what is not supported; see ``check_pattern``.
    """

    def __init__(self, pattern: str):
        check_pattern(pattern)
        self._pattern = re.compile(pattern, re.DOTALL)
        self._beginning = re.compile(rf"(?:{beginnings(pattern)})\Z", re.DOTALL)

    @property
    def group_names(self) -> set[str]:
        """Names of the pattern's groups."""
        return set(self._pattern.groupindex)

    def find(self, text: str, begin: int, end: int) -> Match | None:
        match = self._pattern.search(text, begin, end)
        while match and match.end() - match.start() > MAX_MATCH:
            match = self._pattern.search(text, match.start() + 1, end)
        if match is None:
            return None
        return Match(match.start(), match.end(), {k: v for k, v in match.groupdict().items() if v is not None})

    def pending(self, text: str, begin: int, end: int) -> int:
        return self._beginning.search(text, max(begin, end - MAX_MATCH), end).start()  # the end itself matches


def overlap(text: str, literal: str) -> int:
    """Characters at the end of ``text`` with which this literal may begin."""
    for length in range(min(len(text), len(literal) - 1), 0, -1):
        if text.endswith(literal[:length]):
            return length
    return 0
