"""How deeply JSON values are nested: whatever reads them follows only so far."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Objects and arrays inside each other in what a request carries for others to read."""


def is_too_deep(value: Any) -> bool:
    """Whether more than ``MAX_DEPTH`` objects and arrays are inside each other, ``value`` itself counted."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    return bool(level)


def _children(value: Any) -> list[Any]:
    """Objects and arrays right inside a value."""
    inside = value.values() if isinstance(value, dict) else value
    return [child for child in inside if isinstance(child, (dict, list, tuple))]
