"""Bodies of every route that are valid by its schema, but for one string, number, list or map that is as long as wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from labinfer.server.gateway.endpoints import API

BASES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": ({}, {"tool_choice": "required"}),
    "/v1/responses": ({"input": "red"}, {"input": "red", "tool_choice": "required"}),
    "/v1/responses/input_tokens": ({"input": "red"},),
    "/v1/messages": ({}, {"tool_choice": {"type": "any"}}),
    "/score": ({"text_1": "red", "text_2": ["blue"]}, {"queries": "red", "documents": ["blue"]}),
    "/tokenize": ({"prompt": "red"}, {"messages": [{"role": "user", "content": "red"}]}),
}
"""By path, fields beside those that the schema demands; a further set leads to code that the first one does not reach."""
ONE_FIELD = ("StructuredOutputs",)
"""Structs that may have one of their fields only."""
ONE_TOKEN = ("max_tokens", "max_output_tokens")
"""Fields that keep the answers short."""
NAME = b'"a0"'
"""The JSON string in every string field of an example."""
MAX_VISITS = 1
"""Places of a struct on one path: those inside itself are as those outside."""
Wrap = Callable[[Any], Any]


@dataclass(frozen=True)
class Growth:
    """One place of a route's body that grows.

    Args:
        grown: the place's value, of some ``num_bytes`` bytes.
        wrap: the body around it.
    """

    path: str
    place: str
    grown: Callable[[int], Any]
    wrap: Wrap

    def __str__(self) -> str:
        return f"{self.path} {self.place}"

    def body(self, num_bytes: int) -> bytes:
        """The body with the place grown to some ``num_bytes`` bytes."""
        return msgspec.json.encode(self.wrap(self.grown(num_bytes)))


def growths() -> list[Growth]:
    """Every place of every route that has a body."""
    return [
        growth for endpoint in API if endpoint.body is not None for growth in _growths(endpoint.path, endpoint.body)
    ]


def _growths(path: str, body: type[msgspec.Struct]) -> Iterator[Growth]:
    (schema,), definitions = msgspec.json.schema_components([body], ref_template="{name}")
    walker = _Walker(path, definitions)
    properties = walker.resolve(schema)["properties"]
    short = {name: 1 for name in ONE_TOKEN if name in properties}
    for base in BASES.get(path, ({},)):
        yield from walker.walk(schema, lambda value: value, "$", {schema["$ref"]: 1}, short | base)


class _Walker:
    def __init__(self, path: str, definitions: dict[str, Any]):
        self._path, self._definitions = path, definitions

    def resolve(self, node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = self._definitions[node["$ref"]]
        return node

    def walk(
        self, node: Any, wrap: Wrap, place: str, visits: dict[str, int], base: dict[str, Any] | None = None
    ) -> Iterator[Growth]:
        """Growths inside a part of a schema.

        Args:
            wrap: the body around a value of that part.
            base: fields of an object beside those that are demanded; by default in turn none and all.
        """
        for kind in self._alternatives(node):
            reference = kind.get("$ref")
            if reference is not None and base is None:
                if visits.get(reference, 0) == MAX_VISITS:
                    continue
                visits = visits | {reference: visits.get(reference, 0) + 1}
            kind = self.resolve(kind)
            if "enum" in kind or "const" in kind:
                continue
            yield from self._grow(kind, wrap, place, visits, base)

    def _grow(
        self, kind: dict[str, Any], wrap: Wrap, place: str, visits: dict[str, int], base: dict[str, Any] | None
    ) -> Iterator[Growth]:
        name = kind.get("type")
        if name == "string":
            yield self._growth(f"{place} string", lambda size: "a" * size, wrap)
        elif name in ("integer", "number"):
            yield self._growth(f"{place} digits", lambda size: msgspec.Raw(b"1" * size), wrap)
        elif name == "array":
            for item in self._examples(kind.get("items", {})):
                yield self._growth(f"{place}[] {_label(item)}", _list_of(msgspec.json.encode(item)), wrap)
            yield from self.walk(kind.get("items", {}), lambda value: wrap([value]), f"{place}[0]", visits)
        elif name == "object" and "properties" in kind:
            bases = [base] if base is not None else self._whole_examples(kind) or [{}]
            if kind.get("title") in ONE_FIELD:
                bases = [{}]
            for number, fields in enumerate(bases):
                demanded = {key: self._example(kind["properties"][key]) for key in kind.get("required", ())}
                for key, part in kind["properties"].items():
                    if number and not self._has_schema(part):
                        continue
                    yield from self.walk(
                        part,
                        lambda value, key=key, fields=demanded | fields: wrap(fields | {key: value}),
                        f"{place}.{key}" + (f" beside {_label(fields)}" if fields else ""),
                        visits,
                    )
        elif name == "object":
            part = kind.get("additionalProperties", {})
            prefix = "" if kind.get("propertyNames", {}).get("pattern", "").startswith("^(0") else "a"
            yield self._growth(f"{place} keys", _map_of(self._example(part) if part else 1, prefix), wrap)

            def wrap_value(value: Any) -> Any:
                return wrap({f"{prefix}1": value})

            if part:
                yield from self.walk(part, wrap_value, f"{place}.{prefix}1", visits)
            else:
                yield from self._grow_any(wrap_value, f"{place}.{prefix}1")
        elif name is None:
            yield from self._grow_any(wrap, place)

    def _grow_any(self, wrap: Wrap, place: str) -> Iterator[Growth]:
        """Growths of a value without a schema."""
        yield self._growth(f"{place} string", lambda size: "a" * size, wrap)
        for item in (b"1", b"1.0", b'""', b"[]", b"{}", b'{"a":[""]}'):
            yield self._growth(f"{place}[] {item.decode()}", _list_of(item), wrap)
        yield self._growth(f"{place} keys", _map_of(1, "a"), wrap)
        yield self._growth(f"{place} depth", lambda size: msgspec.Raw(b"[" * (size // 2) + b"]" * (size // 2)), wrap)

    def _growth(self, place: str, grown: Callable[[int], Any], wrap: Wrap) -> Growth:
        return Growth(self._path, place, grown, wrap)

    def _alternatives(self, node: Any) -> list[dict[str, Any]]:
        """Kinds of values but null."""
        if "enum" in node or "anyOf" not in node:
            return [] if node.get("type") == "null" else [node]
        return [kind for part in node["anyOf"] for kind in self._alternatives(part)]

    def _has_schema(self, node: Any) -> bool:
        return any(kind.keys() & {"$ref", "type", "enum"} for kind in self._alternatives(node))

    def _examples(self, node: Any) -> list[Any]:
        """Values of a part of a schema: the shortest of each alternative, and objects with all fields."""
        examples = []
        for kind in self._alternatives(node):
            examples += [self._example(kind), *self._whole_examples(self.resolve(kind))]
        return [example for number, example in enumerate(examples) if example not in examples[:number]]

    def _whole_examples(self, kind: dict[str, Any]) -> list[dict[str, Any]]:
        """Objects with all fields, one of each type."""
        whole = {key: self._example(part) for key, part in kind.get("properties", {}).items()}
        types = [value for value in self._enum(kind.get("properties", {}).get("type", {})) if value is not None]
        return [whole | {"type": value} for value in types] or [whole] * bool(whole)

    def _enum(self, node: Any) -> list[Any]:
        kinds = [node, *self._alternatives(node)]
        return next((kind["enum"] for kind in map(self.resolve, kinds) if "enum" in kind), [])

    def _example(self, node: Any) -> Any:
        """A value of a part of a schema: the fields that are demanded, and no null where something else may stand."""
        kind = self.resolve(next(iter(self._alternatives(node)), {"const": None}))
        if "enum" in kind:
            return kind["enum"][0]
        if "const" in kind:
            return kind["const"]
        name = kind.get("type")
        if name == "string":
            return "a0"
        if name in ("integer", "number"):
            return max(1, kind.get("minimum", 1))
        if name == "array":
            return [self._example(kind.get("items", {}))] if kind.get("minItems") else []
        if name == "object":
            return {key: self._example(kind["properties"][key]) for key in kind.get("required", ())}
        return True if name == "boolean" else None


def _list_of(item: bytes) -> Callable[[int], Any]:
    """Lists of JSON values like ``item``, no two of which have the same name."""

    def named(index: int) -> bytes:
        return item.replace(NAME, b'"a%d"' % index)

    def grown(size: int) -> Any:
        count = max(1, size // (len(named(10**5)) + 1))
        return msgspec.Raw(b"[" + b",".join(map(named, range(count)) if NAME in item else [item] * count) + b"]")

    return grown


def _map_of(value: Any, prefix: str) -> Callable[[int], Any]:
    text = msgspec.json.encode(value)

    def grown(size: int) -> Any:
        count = max(1, size // (len(text) + len(prefix) + 10))
        return msgspec.Raw(
            b"{" + b",".join(b'"%b%d":%b' % (prefix.encode(), index, text) for index in range(count)) + b"}"
        )

    return grown


def _label(example: Any) -> str:
    return msgspec.json.encode(example).decode()[:60]
