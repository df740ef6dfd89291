"""Pairwise samples of parametrised tests: few cases, in which each value of a parameter still meets each value of every other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

Case = tuple[tuple[str, str], ...]
"""A test's parameters by their names, with their values as text."""


def pairwise(cases: Sequence[Case]) -> set[int]:
    """Indices of a sample in which every pair of values occurs that occurs in ``cases``; the same one each time.

    Greedy, as in Cohen et al., The AETG System, IEEE Transactions on Software Engineering 23(7), 1997.
    """
    pairs = [set(combinations(case, 2)) or {case} for case in cases]
    missing, sample = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))
        sample.add(best)
        missing -= pairs[best]
    return sample


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what is in no sample of its test, for tests marked ``pairwise``.

    The marker's arguments name parameters of which every value has a sample of its own.
    """
    tests: dict[tuple, list[tuple[pytest.Item, Case]]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("pairwise")
        if marker is not None and item.get_closest_marker("slow") is None:
            case = tuple((name, repr(value)) for name, value in item.callspec.params.items())
            own = tuple(value for name, value in case if name in marker.args)
            tests[item.parent, item.originalname, own].append((item, case))
    for members in tests.values():
        sample = pairwise([case for _, case in members])
        for index, (item, _) in enumerate(members):
            if index not in sample:
                item.add_marker(pytest.mark.slow)
