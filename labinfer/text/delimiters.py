"""Delimiter: a literal text or a pattern that opens or closes a field of a reply, matched in streamed text.

A delimiter tells where it matches, and from which position on the text may become a match when more text arrives. Text from that
position on must be held back: if it were passed on, the result would depend on how the text is divided into pieces.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import regex

logger = logging.getLogger(__name__)

MAX_MATCH = 1024
"""Maximum length, in characters, of a pattern's match, and of text that is held back because it may become a match."""
MAX_PATTERN = 4096
"""Maximum length of a pattern, in characters."""
MATCH_SECONDS = 0.25
"""Maximum CPU time of one search for a pattern, in seconds."""
USUAL_SECONDS = 0.001
"""CPU time, in seconds, that a search for a pattern may take on average. Patterns of built-in formats take some microseconds."""
Result = TypeVar("Result")
_NO_CHARACTER = r"[^\x00-\U0010ffff]"
_UNSUPPORTED = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?:<[=!]|[a-zA-Z-]+[:)])")


@dataclass(frozen=True)
class Match:
    """A match in a text: from ``begin`` to ``end`` (exclusive), in characters."""

    begin: int
    end: int
    captures: dict[str, str]
    """Texts of the pattern's named groups, by name."""


class Delimiter(Protocol):
    """Opening or closing delimiter of a field in a reply: a literal text or a pattern."""

    def find(self, text: str, begin: int, end: int) -> Match | None:
        """The first match in ``text[begin:end]``; None if there is none."""
        ...

    def pending(self, text: str, begin: int, end: int) -> int:
        """Position in ``text[begin:end]`` from which on the text may become a match, or a longer one, when more text
        arrives; ``end`` if it cannot."""
        ...


class LiteralDelimiter:
    """Delimiter that is any of several literal texts. Where several match, the longest one counts."""

    def __init__(self, literals: list[str]):
        self.literals = literals
        self._pattern = re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))))

    def find(self, text: str, begin: int, end: int) -> Match | None:
        match = self._pattern.search(text, begin, end)
        return Match(match.start(), match.end(), {}) if match else None

    def pending(self, text: str, begin: int, end: int) -> int:
        tail = text[max(begin, end - max(map(len, self.literals)) + 1) : end]
        return end - max(overlap(tail, literal) for literal in self.literals)


class PatternDelimiter:
    """Delimiter that is a regular expression of the ``regex`` package. A dot also matches line feeds.

    Patterns come with checkpoints and match by backtracking, so a search may take long. If all searches for the pattern together
    take ``MATCH_SECONDS`` more than ``USUAL_SECONDS`` each, the pattern is disabled with a warning, and matches nothing.

    Raises:
        ValueError: see ``compile_pattern``.
    """

    def __init__(self, pattern: str):
        self._source, self._pattern = pattern, compile_pattern(pattern)
        # ``_NO_CHARACTER`` never matches, so only partial matches remain: matches cut off by the end of the text.
        self._beginning = compile_pattern(pattern, _NO_CHARACTER)
        self._seconds_left = MATCH_SECONDS

    def find(self, text: str, begin: int, end: int) -> Match | None:
        match = self._search(self._pattern, text, begin, end)
        while match and match.end() - match.start() > MAX_MATCH:
            match = self._search(self._pattern, text, match.start() + 1, end)
        if match is None:
            return None
        return Match(match.start(), match.end(), {k: v for k, v in match.groupdict().items() if v is not None})

    def pending(self, text: str, begin: int, end: int) -> int:
        match = self._search(self._beginning, text, max(begin, end - MAX_MATCH), end, partial=True)
        return match.start() if match else end

    def _search(
        self, pattern: regex.Pattern[str], text: str, begin: int, end: int, partial: bool = False
    ) -> regex.Match[str] | None:
        if self._seconds_left <= 0:
            return None
        began = time.thread_time()
        try:
            return within_time(lambda seconds: pattern.search(text, begin, end, partial=partial, timeout=seconds))
        except TimeoutError:
            return None
        finally:
            allowed = min(MATCH_SECONDS, self._seconds_left + USUAL_SECONDS)
            self._seconds_left = allowed - (time.thread_time() - began)
            if self._seconds_left <= 0:
                logger.warning(
                    "the response template's pattern %.200r takes too long and is no longer used", self._source
                )


def within_time(search: Callable[[float], Result]) -> Result:
    """Result of ``search``, which may take ``MATCH_SECONDS`` of this thread's CPU time.

    Args:
        search: called with a ``timeout`` for the ``regex`` package, in seconds. ``regex`` counts the CPU time of all threads, so
            the search is repeated if this thread has time left.

    Raises:
        TimeoutError: this thread has used up its time.
    """
    end, left = time.thread_time() + MATCH_SECONDS, MATCH_SECONDS
    while True:
        try:
            return search(left)
        except TimeoutError:
            left = end - time.thread_time()
            if left <= 0:
                raise


def compile_pattern(pattern: str, behind: str = "") -> regex.Pattern[str]:
    """Compile a pattern of a response template.

    Args:
        behind: pattern that must match directly after ``pattern``.

    Raises:
        ValueError: the pattern is invalid or too long, or has a flag or a lookbehind (a reply's earlier text is not kept).
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a pattern may have {MAX_PATTERN} characters at most, not {len(pattern)}")
    if _UNSUPPORTED.search(pattern):
        raise ValueError(f"{pattern!r:.200} has a lookbehind or a flag, which is not supported")
    try:
        return regex.compile(f"(?:{pattern}){behind}" if behind else pattern, regex.DOTALL)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r:.200} is not a valid regular expression: {error}") from None


def overlap(text: str, literal: str) -> int:
    """Length of the longest beginning of ``literal`` (shorter than ``literal``) with which ``text`` ends."""
    for length in range(min(len(text), len(literal) - 1), 0, -1):
        if text.endswith(literal[:length]):
            return length
    return 0
