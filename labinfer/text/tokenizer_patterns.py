"""check_patterns: refuses regular expressions in tokenizer files that may take exponential time by backtracking.

The tokenizers library matches patterns by backtracking without a limit, in calls that cannot be interrupted. A repeated
group that matches a text in several ways, as in ``(a+)+``, takes exponential time. No known tokenizer has such a group.
Repeated alternatives of fixed length that begin with different letters are harmless: ``(?:\\r\\n|\\n)+`` matches a text in
one way only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_PATTERN = 1 << 14
"""Maximum length of a pattern, in characters."""
MAX_REPEATS = 3
"""Maximum number of unbounded repetitions in a sequence of a pattern. Each may multiply the matching time by the length of the
text."""
_PART = re.compile(
    r"""(?P<escape>\\(?:[pPuxgkN]\{[^}]*\}|.))|(?P<open>\((?:\?(?:[a-zA-Z-]*:|[=!>]|<[=!]|<\w+>|[a-zA-Z-]+\)))?)|(?P<close>\))"""
    r"""|(?P<or>\|)|(?P<class>\[)|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})[?+]?)|(?P<letter>.)""",
    re.DOTALL,
)
_NO_LETTERS = ".^$# \t\r\n\v\f"
"""Characters that may have a special meaning in a pattern. White space is among them, as a flag may make patterns ignore white
space."""
_ESCAPED = {r"\r": "\r", r"\n": "\n", r"\t": "\t"}


def check_patterns(component: Any) -> None:
    """Refuse a normalizer or pre-tokenizer with a pattern that may take exponential time by backtracking.

    Raises:
        ValueError: the message names the pattern.
    """
    if component is None:
        return
    for pattern in _patterns(json.loads(component.__getstate__())):
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"its pattern {pattern!r:.60} has {len(pattern)} characters; {MAX_PATTERN} are supported")
        if _may_explode(pattern):
            raise ValueError(
                f"its pattern {pattern!r:.100} has nested repetitions, such as (a+)+, which can take exponential time"
            )


def _patterns(node: Any) -> Iterator[str]:
    """Yield all regular expressions in ``node``, JSON of a normalizer or pre-tokenizer."""
    if isinstance(node, dict):
        if isinstance(pattern := node.get("Regex"), str):
            yield pattern
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _patterns(child)


def _may_explode(pattern: str) -> bool:
    """Whether a pattern repeats a group that can match a text in several ways, or has too many repetitions in a
    sequence."""
    position, groups = 0, [_PatternGroup()]
    inner: _PatternGroup | None = None  # the group that was just closed, which a quantifier may follow
    while (part := _PART.match(pattern, position)) is not None:
        position, closed, inner = part.end(), inner, None
        groups[-1].begin(part)
        if part["open"]:
            if not part[0].endswith(")"):  # not if the parenthesis only sets flags
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
    """A group of a pattern, while the pattern is parsed."""

    def __init__(self, is_apart: bool = False):
        self.is_apart = is_apart
        """Whether the group is atomic or a lookaround: the pattern after it cannot make it match in another way."""
        self.repeats = 0
        """Number of unbounded repetitions so far in the group's current alternative."""
        self.varies = False
        """Whether the group may match a text in several ways, or match both a text and a prefix of it."""
        self.has_begun = False
        """Whether the group's current alternative has any part yet."""
        self._letters: list[str] = []  # first letter of each alternative, case-folded; empty if it begins otherwise

    def begin(self, part: re.Match[str]) -> None:
        """Handle the next part of the group, which may begin an alternative."""
        if self.has_begun or part["close"]:
            self.varies |= not self.has_begun and bool(self._letters)  # an empty alternative, as in ``(a|)``
            return
        self.has_begun = True
        letter = _ESCAPED.get(part[0]) or (part["letter"] or "").strip(_NO_LETTERS).casefold()[:1]
        if self._letters:
            self.varies |= not all((letter, *self._letters)) or letter in self._letters
        self._letters.append(letter)


def _class_end(pattern: str, position: int) -> int:
    """Position after a character class whose opening bracket precedes ``position``. Classes may be nested."""
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
