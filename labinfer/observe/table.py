"""Tables as plain text, and quantities in readable units."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as a text table under a header. Columns are aligned, those with numbers to the right."""
    cells = [[str(value) for value in row] for row in rows]
    columns = list(zip(header, *cells, strict=True))
    widths = [max(display_width(text) for text in column) for column in columns]
    right = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            pad(text, width, to_right) for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [list(header), *cells]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def pad(text: str, width: int, to_right: bool) -> str:
    """Pad ``text`` with spaces to ``width`` terminal columns."""
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
