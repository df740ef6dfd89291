"""exclude_each_other: whether ``oneOf`` says no more than ``anyOf``, because no value meets two of its schemas."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

MAX_SCHEMAS = 64
"""Alternatives that are compared with each other."""
MAX_STEPS = 8
"""References that are followed, and properties inside properties that are looked at, for one pair."""
KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
"""Types of JSON by those of Python; whole numbers are numbers, too."""


def exclude_each_other(schemas: list[Any], root: dict[str, Any]) -> bool:
    """Whether it is certain that no value meets two of the schemas.

    Args:
        root: the schema that they stand in, for references.
    """
    if len(schemas) > MAX_SCHEMAS:
        return False
    resolved = [_resolve(schema, root) for schema in schemas]
    return all(_exclude(first, second, root, MAX_STEPS) for first, second in combinations(resolved, 2))


def _exclude(first: dict[str, Any], second: dict[str, Any], root: dict[str, Any], steps: int) -> bool:
    """Whether they differ in their types, in their values, or in a property that both require, such as a discriminator."""
    kinds, other_kinds = _kinds(first), _kinds(second)
    if kinds is not None and other_kinds is not None and not kinds & other_kinds:
        return True
    values, other_values = _values(first), _values(second)
    if values is not None and other_values is not None and not values & other_values:
        return True
    if not steps or kinds != {"object"} or other_kinds != {"object"}:
        return False
    return any(
        _exclude(_property(first, name, root), _property(second, name, root), root, steps - 1)
        for name in set(_required(first)) & set(_required(second))
    )


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """Types that a value may have; None for any."""
    if (values := _allowed(schema)) is not None:
        return {KINDS.get(type(value), "null") for value in values}
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    if not isinstance(kinds, list) or not all(isinstance(name, str) for name in kinds):
        return None
    return {"number" if name == "integer" else name for name in kinds}


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The only values that there may be, as JSON; None for any."""
    values = _allowed(schema)
    return None if values is None else {json.dumps(_plain(value), sort_keys=True) for value in values}


def _allowed(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _plain(value: Any) -> Any:
    """The same with 5 for 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(schema: dict[str, Any], name: str, root: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return _resolve(properties.get(name), root) if isinstance(properties, dict) else {}


def _resolve(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the one that it refers to; an empty one, which says nothing, where that cannot be known."""
    for _ in range(MAX_STEPS):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if reference is None:
            return schema
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return {}
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}
