"""Regular expressions of response templates: those that no text takes long to match.

Python matches by backtracking: a pattern that fits the same text in many ways tries them all before it fails. An upper bound
of its steps is worked out here, and patterns with too many are refused. The rest of a pattern is tried behind each length of a
repetition, but behind one only where it begins with none of the repetition's characters, as in ``[^<]*<``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

MAX_MATCH = 1024
"""Characters of an anchor; what is longer is none. It bounds what is held back, and the time that a pattern takes for it."""
MAX_PATTERN = 4096
"""Characters of a pattern."""
MAX_STEPS = 1 << 13
"""Steps of a pattern at one place of a text: enough for one repetition of any length, and a few short ones."""


def check_pattern(pattern: str) -> None:
    """Refuse patterns that ``beginnings`` cannot read, and those that may take long.

    Raises:
        ValueError: says what is wrong with it.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a pattern may have {MAX_PATTERN} characters at most, not {len(pattern)}")
    try:
        re.compile(pattern, re.DOTALL)
        num_steps = _Reader(pattern).num_steps()
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r:.200} is no regular expression: {error}") from None
    if num_steps > MAX_STEPS:
        raise ValueError(
            f"{pattern!r:.200} may fit the same text in too many ways, which may take very long; bound its repetitions, or let "
            "each end with a character that it has not, as [^<]*< does"
        )


def fixed_beginning(pattern: str) -> str:
    """A text with which every match of a checked pattern begins; empty where it is not the same for all."""
    elements, beginning = list(_ELEMENT.finditer(pattern)), ""
    if any(element["or"] for element in elements):
        return ""
    for element in elements:
        if element["repeat"]:
            return beginning[:-1]
        if not (letter := _plain_letter(element)):
            return beginning
        beginning += letter
    return beginning


def fixed_ending(pattern: str) -> str:
    """A text with which every match of a checked pattern ends; empty where it is not the same for all."""
    ending = ""
    for element in _ELEMENT.finditer(pattern):
        if element["or"]:
            return ""
        letter = _plain_letter(element)
        ending = ending + letter if letter else ""
    return ending


def beginnings(pattern: str) -> str:
    """The pattern of all beginnings of matches that reach the end of a text, and of whole ones.

    Each element may also match the end of the text: ``a[bc]+`` becomes ``(?:a|\\Z)(?:[bc]|\\Z)+``.
    """

    def extend(element: re.Match[str]) -> str:
        if element["open"]:
            return "(?:"
        return rf"(?:{element[0]}|\Z)" if element["one"] else element[0]

    return _ELEMENT.sub(extend, pattern)


_ELEMENT = re.compile(
    r"""(?P<open>\((?:\?(?:P<\w+>|:|=))?)|(?P<close>\))|(?P<or>\|)"""
    r"""|(?P<repeat>(?:[*+?]|\{(?P<low>\d*)(?P<to>,?)(?P<high>\d*)(?<!\{)\})\??)|(?P<place>\\[AZbB]|[$^])"""
    r"""|(?P<one>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^\dxuUN])|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\])""",
    re.DOTALL,
)


def _escaped_characters(pattern: str) -> Iterator[str]:
    """Characters that a pattern names by their numbers.

    Raises:
        ValueError: it names one by its name.
    """
    for escape in re.finditer(r"\\(?:x(..)|u(.{4})|U(.{8})|(N)|.)", pattern, re.DOTALL):
        if escape[4]:
            raise ValueError(f"{escape[0]!r} in {pattern!r:.200} is not supported")
        if number := escape[1] or escape[2] or escape[3]:
            yield chr(int(number, 16))


def _plain_letter(element: re.Match[str]) -> str:
    """The one character that an element matches; empty where it matches several, or none."""
    letter = element["one"] or ""
    if letter.startswith("\\"):
        return letter[1] if len(letter) == 2 and not letter[1].isalnum() else ""
    return letter if len(letter) == 1 and letter != "." else ""


# A pattern as a tree. Sets of letters are those among a sample of Unicode that has all characters of the pattern itself.

Letters = frozenset[str]
_SAMPLE = "".join(map(chr, [*range(0x180), *range(0x180, 0xD800, 251), *range(0xE000, 0x20000, 251)]))


@dataclass(frozen=True)
class _Letter:
    """An element that matches one character, or a place between two: ``first`` is empty then."""

    first: Letters
    varies = False
    looks_ahead = False

    @property
    def may_be_empty(self) -> bool:
        return not self.first

    def num_steps(self, rest: int, follow: Letters) -> int:
        """Steps to match it and the rest of the pattern.

        Args:
            rest: steps of the rest.
            follow: letters with which the rest may begin.
        """
        return rest


@dataclass(frozen=True)
class _Repeat:
    """An element or a group, repeated."""

    inner: _Letter | _Group
    num_lengths: int
    may_be_empty: bool
    varies = True
    looks_ahead = False

    @property
    def first(self) -> Letters:
        return self.inner.first

    def num_steps(self, rest: int, follow: Letters) -> int:
        steps = self.inner.num_steps(rest, follow | self.first)
        return steps * self.num_lengths if self.first & follow else steps + self.num_lengths


@dataclass(frozen=True)
class _Group:
    """Alternatives, each a sequence."""

    alternatives: list[list[_Letter | _Repeat | _Group]]
    is_lookahead: bool = False

    @cached_property
    def first(self) -> Letters:
        return frozenset().union(*(_first(parts) for parts in self.alternatives))

    @cached_property
    def may_be_empty(self) -> bool:
        return any(all(part.may_be_empty for part in parts) for parts in self.alternatives)

    @cached_property
    def varies(self) -> bool:
        return len(self.alternatives) > 1 or any(part.varies for parts in self.alternatives for part in parts)

    @cached_property
    def looks_ahead(self) -> bool:
        return self.is_lookahead or any(parts and parts[-1].looks_ahead for parts in self.alternatives)

    def num_steps(self, rest: int, follow: Letters) -> int:
        counts, firsts = [], []
        for parts in self.alternatives:
            count, first = rest, follow
            for part in reversed(parts):
                count = part.num_steps(count, first)
                first = part.first | first if part.may_be_empty else part.first
            counts.append(count)
            firsts.append(first)
        are_apart = sum(map(len, firsts)) == len(frozenset().union(*firsts))
        return max(counts) if are_apart else sum(counts)


def _first(parts: list[_Letter | _Repeat | _Group]) -> Letters:
    """Letters with which a sequence may begin."""
    letters: set[str] = set()
    for part in parts:
        letters |= part.first
        if not part.may_be_empty:
            break
    return frozenset(letters)


class _Reader:
    """Reads a pattern that Python has compiled into a tree.

    Raises:
        ValueError: something in the pattern is not supported.
    """

    def __init__(self, pattern: str):
        self._pattern, self._position = pattern, 0
        self._sample = "".join({*_SAMPLE, *pattern, *_escaped_characters(pattern)})
        self._known: dict[str, Letters] = {}
        self._tree = self._group("")

    def num_steps(self) -> int:
        """Steps of a match at one place, whatever follows it."""
        return self._tree.num_steps(1, frozenset(self._sample))

    def _group(self, opening: str) -> _Group:
        alternatives: list[list[_Letter | _Repeat | _Group]] = [[]]
        while self._position < len(self._pattern):
            element = _ELEMENT.match(self._pattern, self._position)
            if element is None or (element[0] == "(" and self._pattern.startswith("(?", self._position)):
                raise ValueError(f"{self._pattern[self._position :][:12]!r} in {self._pattern!r:.200} is not supported")
            self._position = element.end()
            parts = alternatives[-1]
            if element["close"]:
                break
            if element["or"]:
                alternatives.append([])
                continue
            if parts and parts[-1].looks_ahead:
                raise ValueError(f"{self._pattern!r:.200} goes on behind a lookahead, which is not supported")
            if element["open"]:
                parts.append(self._group(element["open"]))
            elif element["repeat"]:
                parts.append(self._repeat(parts.pop(), element))
            else:
                parts.append(_Letter(self._letters(element)))
        return _Group(alternatives, opening == "(?=")

    def _repeat(self, inner: _Letter | _Group, element: re.Match[str]) -> _Repeat:
        sign = element["repeat"]
        if inner.varies and sign.rstrip("?"):  # more than optional
            raise ValueError(f"{self._pattern!r:.200} repeats a group of several forms, which may take for ever")
        low, high = {"*": (0, MAX_MATCH), "+": (1, MAX_MATCH), "?": (0, 1)}.get(sign[0], (0, 0))
        if sign[0] == "{":
            low = min(int(element["low"] or 0), MAX_MATCH)
            high = min(int(element["high"] or MAX_MATCH), MAX_MATCH) if element["to"] else low
        return _Repeat(inner, high - low + 1, low == 0 or inner.may_be_empty)

    def _letters(self, element: re.Match[str]) -> Letters:
        if element["place"]:
            return frozenset()
        if letter := _plain_letter(element):
            return frozenset(letter)
        if element["one"] not in self._known:
            letters = re.compile(element["one"], re.DOTALL).findall(self._sample)
            self._known[element["one"]] = frozenset(letters)
        return self._known[element["one"]]
