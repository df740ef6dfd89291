"""spread: mean, median and percentiles of a list of times, as benchmarks print these."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from labinfer.observe.table import format_table, percentile

STATISTICS = ("mean", "median", "p90", "p99")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and percentiles (by nearest rank) of ``values``, by the names in ``STATISTICS``; empty without
    values."""
    if not values:
        return {}
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
    }


def spread_keys(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and percentiles of ``seconds`` in milliseconds, with the keys of vLLM's JSON files: for the name ``ttft``,
    ``{"mean_ttft_ms": …}``."""
    return {f"{statistic}_{name}_ms": round(1000 * value, 3) for statistic, value in spread(seconds).items()}


def spread_table(rows: dict[str, Sequence[float]]) -> str:
    """Table with mean, median and percentiles, in milliseconds, of each entry of ``rows`` (name → values in seconds). Entries
    without values are left out."""
    spreads = {name: spread(seconds) for name, seconds in rows.items() if seconds}
    cells = [
        (name, *(round(1000 * values[statistic], 2) for statistic in STATISTICS)) for name, values in spreads.items()
    ]
    return format_table(("milliseconds", *STATISTICS), cells)
