"""JSON depth: limit on the nesting of JSON values in requests; some libraries fail on deeply nested values."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of objects and arrays in a JSON value of a request, if the value is passed to a library."""


def exceeds_max_depth(value: Any) -> bool:
    """Whether objects and arrays are nested deeper than ``MAX_DEPTH``, ``value`` itself included."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    return bool(level)


def _children(value: Any) -> list[Any]:
    """Objects and arrays directly inside a value."""
    inside = value.values() if isinstance(value, dict) else value
    return [child for child in inside if isinstance(child, (dict, list, tuple))]
