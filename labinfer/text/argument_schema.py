"""ArgumentSchema: schema of a function's arguments, for models that write each argument as plain text, for example between tags.
Says which texts are allowed, and converts them to JSON values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

from labinfer.text.json_schema import json_type

UNIONS = ("anyOf", "oneOf")
DEFINITIONS = ("$defs", "definitions")
Result = TypeVar("Result")


@dataclass(kw_only=True)
class ValueTexts:
    """Texts by which a model can write the values that an argument's schema allows."""

    takes_any: bool = False
    """Whether the schema allows every string of ``min_length`` to ``max_length`` characters."""
    min_length: int = 0
    max_length: int | None = None
    strings: list[str] = field(default_factory=list)
    """Allowed values that are strings, written without quotes."""
    values: list[str] = field(default_factory=list)
    """Allowed values other than strings, as JSON."""
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of other allowed values, which the model writes as JSON."""


class ArgumentSchema:
    """The schema of a function's arguments.

    Reads JSON Schema as clients send it (version 2020-12, and older forms of pydantic): types, unions, ``enum``, ``const``,
    ``nullable``, and references within the schema. No schema raises an error.

    Args:
        parameters: schema of the object that consists of all arguments.
    """

    def __init__(self, parameters: dict[str, Any]):
        self._root = parameters
        self.definitions = {key: parameters[key] for key in DEFINITIONS if key in parameters}
        """Parts of ``parameters`` to which a ``$ref`` in the schema of an argument may point."""
        self.properties: dict[str, Any] = {}
        """Schemas of the arguments, by name."""
        self.required: set[str] = set()
        for part in _shallow(lambda: list(self._conjuncts(parameters)), []):
            properties, required = part.get("properties"), part.get("required")
            self.properties |= properties if isinstance(properties, dict) else {}
            self.required |= set(filter(_is_text, required)) if isinstance(required, list) else set()

    def cast(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert the texts in a call's arguments to the types of their schemas.

        A text that no type of its schema accepts stays a text.
        """
        cast = dict(arguments)
        for key, value in arguments.items():
            types = _shallow(lambda key=key: self._types(self.properties.get(key), set()), [])
            if isinstance(value, str):
                cast[key] = _cast(value, types)
            elif isinstance(value, list) and types and "array" not in types:  # repeated tags of one key
                cast[key] = [_cast(item, types) if isinstance(item, str) else item for item in value]
        return cast

    def takes_string(self, key: str) -> bool:
        """Whether the argument ``key`` may be a string."""
        types = _shallow(lambda: self._types(self.properties.get(key), set()), [])
        return not types or "string" in types

    def texts(self, key: str) -> ValueTexts:
        """Allowed texts of the argument ``key``; any text if its schema does not restrict it."""
        texts = ValueTexts()
        _shallow(lambda: self._add_texts(texts, self.properties.get(key), set()), None)
        if texts.strings or texts.values or texts.schemas:
            texts.min_length, texts.max_length = 0, None  # length bounds hold for strings only
        else:
            texts.takes_any = True
        return texts

    def _types(self, schema: Any, seen: set[int]) -> list[str]:
        """Names of the types that a schema allows, in the order in which the schema lists them."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return []
        seen.add(id(schema))
        types = _declared(schema)
        for union in UNIONS:
            types += [kind for choice in _parts(schema, union) for kind in self._types(choice, seen)]
        if not types:
            types = self._implied(schema, seen)
        return types + ["null"] * bool(schema.get("nullable"))

    def _implied(self, schema: dict[str, Any], seen: set[int]) -> list[str]:
        """Names of the types that a schema without ``type`` allows, judging by its other keywords."""
        if values := _fixed_values(schema):
            return list(dict.fromkeys(map(_kind, values)))
        for part in self._further(schema):
            if types := self._types(part, seen):
                return types
        return ["object"] * ("properties" in schema) + ["array"] * ("items" in schema)

    def _add_texts(self, texts: ValueTexts, schema: Any, seen: set[int]) -> None:
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        declared = _declared(schema)
        if values := _fixed_values(schema):
            texts.strings += [value for value in values if isinstance(value, str)]
            texts.values += [json.dumps(value, ensure_ascii=False) for value in values if not isinstance(value, str)]
        elif "string" in declared:
            texts.min_length, texts.max_length = 0, None
            if declared == ["string"] and not texts.takes_any:  # several string schemas may have several bounds
                texts.min_length, texts.max_length = _count(schema, "minLength") or 0, _count(schema, "maxLength")
            texts.takes_any = True
        elif declared:
            texts.schemas.append(schema)
        elif choices := [choice for union in UNIONS for choice in _parts(schema, union)]:
            for choice in choices:
                self._add_texts(texts, choice, seen)
        elif parts := [part for part in self._further(schema) if self._types(part, set())]:
            self._add_texts(texts, parts[0], seen)
        elif types := self._types(schema, set()):
            texts.schemas.append({"type": types[0]} | schema)
        else:
            texts.takes_any = True
        if schema.get("nullable"):
            texts.values.append("null")

    def _conjuncts(self, schema: Any, seen: set[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yield ``schema`` and all schemas that a value of it must also match, found through ``$ref`` and ``allOf``."""
        seen = set() if seen is None else seen
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            for part in self._further(schema):
                yield from self._conjuncts(part, seen)

    def _further(self, schema: dict[str, Any]) -> list[Any]:
        """Schemas that a value must match in addition to ``schema``: the targets of its ``$ref`` and ``allOf``."""
        return [self._follow(schema.get("$ref")), *_parts(schema, "allOf")]

    def _follow(self, reference: Any) -> Any:
        """The schema at a JSON pointer (RFC 6901) of the root schema; None if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        node: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node


def _shallow(read: Callable[[], Result], otherwise: Result) -> Result:
    """Return the result of ``read``, or ``otherwise`` if it exceeds Python's recursion limit, as references in the schema nest too
    deeply."""
    try:
        return read()
    except RecursionError:
        return otherwise


def _declared(schema: dict[str, Any]) -> list[str]:
    declared = schema.get("type")
    return [json_type(name) for name in (declared if isinstance(declared, list) else [declared]) if _is_text(name)]


def _parts(schema: dict[str, Any], keyword: str) -> list[Any]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []


def _fixed_values(schema: dict[str, Any]) -> list[Any]:
    values = schema.get("enum")
    return [schema["const"]] if "const" in schema else values if isinstance(values, list) else []


def _count(schema: dict[str, Any], keyword: str) -> int | None:
    count = schema.get(keyword)
    return count if isinstance(count, int) and count >= 0 else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _kind(value: Any) -> str:
    """Name of a value's type in JSON Schema."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


# Casts of texts to values. If a text matches several types, the first type in this list wins.


def _cast(text: str, types: list[str]) -> Any:
    for kind in types:
        try:
            return _CASTS[kind](text)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
    return text


def _cast_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _cast_number(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")) or number != number:
        raise ValueError("JSON has no such number")
    return int(number) if number.is_integer() and "." not in text else number


def _choose(meanings: dict[str, Any]) -> Callable[[str], Any]:
    return lambda text: meanings[text.strip()]


def _cast_json(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(f"not {kind.__name__}")
        return value

    return read


_CASTS: dict[str, Callable[[str], Any]] = {
    "integer": _cast_integer,
    "number": _cast_number,
    "boolean": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()],
    "null": _choose({"null": None, "None": None}),
    "object": _cast_json(dict),
    "array": _cast_json(list),
}
