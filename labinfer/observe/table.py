"""Text: tables, and quantities in readable units."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

GAP = "  "
"""Spaces between two columns of a table."""


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], max_width: int = 0) -> str:
    """Format rows as a text table under a header. Columns are aligned, those with numbers to the right.

    Args:
        max_width: width of the terminal; 0 for no limit. Columns that do not fit form further tables below the first, which also
            begin with the first column.
    """
    cells = [list(header), *([str(value) for value in row] for row in rows)]
    widths = [max(map(display_width, column)) for column in zip(*cells, strict=True)]
    right = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    tables = []
    for columns in _divide(widths, max_width):
        lines = [GAP.join(pad(line[i], widths[i], right[i]) for i in columns).rstrip() for line in cells]
        rule = GAP.join("-" * widths[i] for i in columns)
        tables.append("\n".join([lines[0], rule[: max_width or None], *lines[1:]]))
    return "\n\n".join(tables)


def _divide(widths: Sequence[int], max_width: int) -> list[list[int]]:
    """Divide columns of the widths ``widths`` among tables that fit ``max_width``. Returns the column indices of each table, which
    begin with column 0 and at least one other column."""
    tables = [[0]]
    for column in range(1, len(widths)):
        wide = sum(widths[i] for i in (*tables[-1], column)) + len(GAP) * len(tables[-1]) > max_width
        if max_width and wide and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(column)
    return tables


def pad(text: str, width: int, to_right: bool) -> str:
    """Pad ``text`` with spaces to ``width`` terminal columns; with ``to_right`` the spaces come first."""
    space = " " * (width - display_width(text))
    return space + text if to_right else text + space


def display_width(text: str) -> int:
    """Number of terminal columns that ``text`` takes: Chinese characters take two, combining accents none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def format_bytes(count: float) -> str:
    """Number of bytes as text: 1536 → ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Number of seconds as text: 0.0042 → ``4.2 ms``."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def percentile(values: Sequence[float], fraction: float) -> float:
    """Percentile by nearest rank: the smallest value that at least ``fraction`` of the values do not exceed. NaN
    without values."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]
