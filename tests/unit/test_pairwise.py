"""Samples of parametrised tests hold every two values of two parameters, and few cases."""

from __future__ import annotations

from itertools import combinations, product

from pairwise import sample


def test_every_two_values_that_occur_together_are_in_few_cases():
    counts = {"size": 7, "dtype": 3, "tokens": 6, "group": 3}
    cases = [tuple(zip(counts, map(str, values), strict=True)) for values in product(*map(range, counts.values()))]
    cases = [case for case in cases if ("size", "0") not in case or ("dtype", "2") not in case]
    chosen = sample(cases, 2)
    found = {pair for index in chosen for pair in combinations(cases[index], 2)}
    assert found == {pair for case in cases for pair in combinations(case, 2)}
    assert 7 * 6 <= len(chosen) < 60 < 300 < len(cases)


def test_one_parameter_keeps_all_its_values():
    assert sample([(("size", str(size)),) for size in range(5)], 2) == set(range(5))


def test_each_value_occurs_in_as_many_cases_as_one_parameter_has():
    cases = [(("format", str(number)), ("family", str(other))) for number in range(3) for other in range(5)]
    chosen = [cases[index] for index in sample(cases, 1)]
    assert len(chosen) == 5 and {value for case in chosen for value in case} == {
        value for case in cases for value in case
    }
