"""The highest rate that keeps goals, where the limit is known."""

from __future__ import annotations

import math

import pytest

from labinfer.planner.simulator.rates import LOWEST, PRECISION, highest_rate


@pytest.mark.parametrize("limit", [0.03, 0.9, 1.0, 7.3, 1500.0])
def test_limit_is_met_from_below(limit):
    tried = []

    def is_kept(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    rate = highest_rate(is_kept)
    assert limit / PRECISION <= rate <= limit
    assert len(tried) < 20


def test_any_rate_is_told():
    assert highest_rate(lambda rate: True) == math.inf


def test_no_rate_is_told():
    assert highest_rate(lambda rate: False) == 0.0
    assert highest_rate(lambda rate: rate <= LOWEST / 2) == 0.0
