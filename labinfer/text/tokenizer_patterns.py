"""Regular expressions of tokenizers: those of which no match takes for ever.

The tokenizers library matches by backtracking, without a limit, in a call that nobody can break off. A group of several forms
that is repeated, as in ``(a+)+``, has so many ways through a text that a short one takes longer than anybody lives. No known
tokenizer has one. Forms of one length each, of which no two begin with the same letter, are harmless: ``(?:\\r\\n|\\n)+`` has one
way through a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_PATTERN = 1 << 14
"""Characters of a pattern."""
MAX_REPEATS = 3
"""Unbounded repetitions in a sequence: with each, the time for a long text may grow by the power of one."""
_PART = re.compile(
    r"""(?P<escape>\\(?:[pPuxgkN]\{[^}]*\}|.))|(?P<open>\((?:\?(?:[a-zA-Z-]*:|[=!>]|<[=!]|<\w+>|[a-zA-Z-]+\)))?)|(?P<close>\))"""
    r"""|(?P<or>\|)|(?P<class>\[)|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})[?+]?)|(?P<letter>.)""",
    re.DOTALL,
)
_NO_LETTERS = ".^$# \t\r\n\v\f"
"""Characters that may mean something else, where spaces are ignored, too."""
_ESCAPED = {r"\r": "\r", r"\n": "\n", r"\t": "\t"}


def check_patterns(component: Any) -> None:
    """Refuse a normalizer or pre-tokenizer with a pattern that may take for ever.

    Raises:
        ValueError: names the pattern.
    """
    if component is None:
        return
    for pattern in _patterns(json.loads(component.__getstate__())):
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"its pattern {pattern!r:.60} has {len(pattern)} characters; {MAX_PATTERN} are supported")
        if _may_explode(pattern):
            raise ValueError(
                f"its pattern {pattern!r:.100} repeats what may be matched in several ways, as (a+)+ does, which may take for ever"
            )


def _patterns(node: Any) -> Iterator[str]:
    """All expressions in a component's JSON."""
    if isinstance(node, dict):
        if isinstance(pattern := node.get("Regex"), str):
            yield pattern
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _patterns(child)


def _may_explode(pattern: str) -> bool:
    """Whether a group that varies is repeated, or too many repetitions follow one another."""
    position, groups = 0, [_PatternGroup()]
    inner: _PatternGroup | None = None  # the group that ended just before, to which a repetition would belong
    while (part := _PART.match(pattern, position)) is not None:
        position, closed, inner = part.end(), inner, None
        groups[-1].begin(part)
        if part["open"]:
            if not part[0].endswith(")"):  # but for flags alone
                groups.append(_PatternGroup(is_apart=part[0] in ("(?=", "(?!", "(?<=", "(?<!", "(?>")))
        elif part["close"] and len(groups) > 1:
            inner = groups.pop()
            if not inner.is_apart:
                groups[-1].repeats += inner.repeats
                groups[-1].varies |= inner.varies
        elif part["or"]:
            groups[-1].has_begun = False
            groups[-1].repeats = 0
        elif part["class"]:
            position = _class_end(pattern, position)
        elif part["repeat"] and part["repeat"] not in ("?", "??", "?+"):
            sign = part["repeat"]
            is_long = sign[0] in "*+" or sign.rstrip("?+").endswith(",}")
            is_fixed = sign[0] == "{" and "," not in sign
            if closed is not None and closed.varies and not closed.is_apart and sign not in ("{1}", "{0,1}", "{,1}"):
                return True
            groups[-1].repeats += is_long
            groups[-1].varies |= not is_fixed
        elif part["repeat"]:
            groups[-1].varies = True
        if groups[-1].repeats > MAX_REPEATS:
            return True
    return False


class _PatternGroup:
    """State of a group that is being read."""

    def __init__(self, is_apart: bool = False):
        self.is_apart = is_apart
        """Whether nothing behind it makes it match in another way."""
        self.repeats = 0
        """Unbounded repetitions in the present alternative."""
        self.varies = False
        """Whether it may match a text in several ways, or several texts of which one begins with another."""
        self.has_begun = False
        """Whether the present alternative has a first part."""
        self._letters: list[str] = []  # that alternatives begin with, each folded; empty for any other beginning

    def begin(self, part: re.Match[str]) -> None:
        """Take the next part, which may be the first one of an alternative."""
        if self.has_begun or part["close"]:
            self.varies |= not self.has_begun and bool(self._letters)  # ``(a|)``
            return
        self.has_begun = True
        letter = _ESCAPED.get(part[0]) or (part["letter"] or "").strip(_NO_LETTERS).casefold()[:1]
        if self._letters:
            self.varies |= not all((letter, *self._letters)) or letter in self._letters
        self._letters.append(letter)


def _class_end(pattern: str, position: int) -> int:
    """Position behind a class of characters that has begun; classes may be inside each other."""
    depth = 1
    if pattern.startswith("^", position):
        position += 1
    if pattern.startswith("]", position):
        position += 1
    while depth and position < len(pattern):
        letter = pattern[position]
        position += 2 if letter == "\\" else 1
        depth += (letter == "[") - (letter == "]")
    return position
