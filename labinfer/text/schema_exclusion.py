"""SchemaExclusion: finds out whether ``oneOf`` is equivalent to ``anyOf``, because no value matches two of the alternatives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations
from typing import Any

MAX_SCHEMAS = 64
"""Maximum number of alternatives of ``oneOf`` for which every pair is compared."""
MAX_STEPS = 8
"""Maximum number of references that are followed, and of levels of properties that are examined, for each pair of
schemas."""
COMPARISONS_PER_BYTE = 4
"""Maximum number of comparisons per byte of a schema. A ``oneOf`` of 64 schemas with a discriminator needs three. A comparison
takes about 1 µs."""
MIN_COMPARISONS = 64
CHARACTERS_PER_COMPARISON = 16
"""Number of characters of a reference, or of values of an ``enum``, whose processing counts as one comparison."""
KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
"""Type in JSON of each Python type. Integers are numbers."""


@dataclass(frozen=True)
class _Summary:
    """What is compared of two schemas: allowed types, allowed values, and required properties."""

    schema: dict[str, Any]
    kinds: frozenset[str] | None
    """JSON types that the schema allows; None for any type."""
    values: frozenset[str] | None
    """All values that the schema allows, as JSON; None for any value."""
    required: frozenset[str]


class SchemaExclusion:
    """Decides whether schemas exclude each other, that is, whether no value matches two of them. Takes time linear in
    the length of the whole schema.

    Args:
        root: the whole schema, for references.
        num_bytes: length of ``root`` as JSON.
    """

    def __init__(self, root: dict[str, Any], num_bytes: int):
        self._root = root
        self._num_left = MIN_COMPARISONS + COMPARISONS_PER_BYTE * num_bytes
        self._summaries: dict[int, _Summary] = {}  # by ``id`` of the schema, which the summary keeps alive

    def holds(self, schemas: list[Any]) -> bool:
        """Whether no value can match two of ``schemas``. False, too, if deciding takes too long."""
        if len(schemas) > MAX_SCHEMAS:
            return False
        summaries = [self._summarize(schema) for schema in schemas]
        return all(self._exclude(first, second, MAX_STEPS) for first, second in combinations(summaries, 2))

    def _exclude(self, first: _Summary, second: _Summary, steps: int) -> bool:
        """Whether no JSON value can match both schemas, because their types, their values, or a property that both
        require differ."""
        self._num_left -= 1
        if self._num_left <= 0:
            return False
        if first.kinds is not None and second.kinds is not None and not first.kinds & second.kinds:
            return True
        if first.values is not None and second.values is not None:
            self._num_left -= min(len(first.values), len(second.values)) // CHARACTERS_PER_COMPARISON
            if first.values.isdisjoint(second.values):
                return True
        if not steps or first.kinds != {"object"} or second.kinds != {"object"}:
            return False
        self._num_left -= min(len(first.required), len(second.required)) // CHARACTERS_PER_COMPARISON
        return any(
            self._exclude(self._property(first, name), self._property(second, name), steps - 1)
            for name in first.required & second.required
        )

    def _property(self, owner: _Summary, name: str) -> _Summary:
        properties = owner.schema.get("properties")
        return self._summarize(properties.get(name) if isinstance(properties, dict) else None)

    def _summarize(self, schema: Any) -> _Summary:
        schema = self._resolve(schema)
        if (known := self._summaries.get(id(schema))) is not None:
            return known
        summary = _Summary(schema, _kinds(schema), _values(schema), _required(schema))
        if schema:
            self._summaries[id(schema)] = summary
        return summary

    def _resolve(self, schema: Any) -> dict[str, Any]:
        """Follow the references of ``schema``. Returns an empty schema, which allows any value, if a reference cannot be
        resolved."""
        for _ in range(MAX_STEPS):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if reference is None:
                return schema
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return {}
            self._num_left -= len(reference) // CHARACTERS_PER_COMPARISON
            if self._num_left <= 0:
                return {}
            schema = self._root
            for step in reference[2:].split("/"):
                schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
        return {}


def _kinds(schema: dict[str, Any]) -> frozenset[str] | None:
    if (values := _allowed(schema)) is not None:
        return frozenset(KINDS.get(type(value), "null") for value in values)
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind
    if not isinstance(kinds, list) or not all(isinstance(name, str) for name in kinds):
        return None
    return frozenset("number" if name == "integer" else name for name in kinds)


def _values(schema: dict[str, Any]) -> frozenset[str] | None:
    values = _allowed(schema)
    return None if values is None else frozenset(json.dumps(_plain(value), sort_keys=True) for value in values)


def _allowed(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _plain(value: Any) -> Any:
    """Convert ``value`` to an int if it is a float without a fraction, such as 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _required(schema: dict[str, Any]) -> frozenset[str]:
    names = schema.get("required")
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
