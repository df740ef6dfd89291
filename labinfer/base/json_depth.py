"""The maximum depth of JSON values in requests; libraries that read deeper ones fail."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Objects and arrays inside each other in a JSON value of a request that is handed on to a library."""


def exceeds_max_depth(value: Any) -> bool:
    """Whether more than ``MAX_DEPTH`` objects and arrays are inside each other, ``value`` itself counted."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    return bool(level)


def _children(value: Any) -> list[Any]:
    """Objects and arrays directly inside a value."""
    inside = value.values() if isinstance(value, dict) else value
    return [child for child in inside if isinstance(child, (dict, list, tuple))]
