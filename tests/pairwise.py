"""Samples of parametrised tests: few cases, in which each value of a parameter still meets each value of every other, or occurs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

Case = tuple[tuple[str, str], ...]
"""A test's parameters by their names, with their values as text."""
STRENGTHS = {"each_value": 1, "pairwise": 2}
"""How many values each sample has together, by marker."""


def sample(cases: Sequence[Case], strength: int) -> set[int]:
    """Indices of cases in which all values, or as many values together as ``strength`` says, occur that occur in ``cases``; the
    same ones each time.

    Greedy, as in Cohen et al., The AETG System, IEEE Transactions on Software Engineering 23(7), 1997.
    """
    tuples = [set(combinations(case, strength)) or {case} for case in cases]
    missing, chosen, used = set().union(*tuples), set(), Counter()
    while missing:  # values that were taken seldom come first, so that all of them have their turn
        gains = [
            (len(own & missing), -sum(used[value] for value in case)) for own, case in zip(tuples, cases, strict=True)
        ]
        best = gains.index(max(gains))
        chosen.add(best)
        missing -= tuples[best]
        used.update(cases[best])
    return chosen


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what is in no sample of its test, for tests marked ``pairwise`` or ``each_value``.

    The markers' arguments name parameters of which every value has a sample of its own.
    """
    tests: dict[tuple, list[tuple[pytest.Item, Case]]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("pairwise") or item.get_closest_marker("each_value")
        if marker is not None and item.get_closest_marker("slow") is None:
            case = tuple((name, repr(value)) for name, value in item.callspec.params.items())
            own = tuple(value for name, value in case if name in marker.args)
            tests[item.parent, item.originalname, STRENGTHS[marker.name], own].append((item, case))
    for (_, _, strength, _), members in tests.items():
        chosen = sample([case for _, case in members], strength)
        for index, (item, _) in enumerate(members):
            if index not in chosen:
                item.add_marker(pytest.mark.slow)
