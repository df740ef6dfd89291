"""Alternatives of ``oneOf``: which exclude each other for certain."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import pydantic
import pytest

from labinfer.text.json_schema import fit_schema
from labinfer.text.schema_exclusion import MAX_SCHEMAS, SchemaExclusion


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "wolf"]


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


def tagged(value, **fields):
    return {"type": "object", "properties": {"kind": {"const": value}} | fields, "required": ["kind"]}


LOOP = {"$defs": {"A": {"$ref": "#/$defs/A"}}}


@pytest.mark.parametrize(
    ("schemas", "excluded"),
    [
        ([{"type": "string"}, {"type": ["null", "array"]}, {"type": "integer"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"const": 2}, {"enum": ["1", None]}], True),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"const": True}], True),
        ([{"const": "a"}, {"type": "string"}], False),
        ([{"const": "a"}, {"type": "object"}], True),
        ([tagged("a"), tagged("b"), tagged("c", more={"type": "null"})], True),
        ([tagged("a"), tagged("b"), tagged("a", more={"type": "null"})], False),
        ([tagged("a"), tagged("b") | {"required": []}], False),
        ([tagged("a"), {key: value for key, value in tagged("b").items() if key != "type"}], False),
        ([{"$ref": "#/$defs/A"}, {"type": "string"}], False),
        ([{"$ref": "#/none"}, {"type": "string"}], False),
        ([True, {"type": "string"}], False),
        ([{"const": number} for number in range(MAX_SCHEMAS + 1)], False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_only_what_is_certain_counts(schemas, excluded):
    assert SchemaExclusion(LOOP, 100).holds(schemas) is excluded


def recursive_union(num_properties: int) -> dict:
    """Two alternatives whose required properties are all the alternatives themselves."""

    def alternative(name: str) -> dict:
        properties = {f"p{number}": {"$ref": f"#/$defs/{name}"} for number in range(num_properties)}
        return {"type": "object", "required": list(properties), "properties": properties}

    union = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    return {"properties": {"a": union}, "$defs": {name: alternative(name) for name in "ab"}}


def test_recursive_alternatives_take_time_that_grows_with_the_schema():
    """Comparing all paths of 20 properties to a depth of 8 would take 20**8 comparisons."""
    begin = time.process_time()
    left_out: list[str] = []
    fit_schema(recursive_union(20), "response_format", False, left_out)
    assert time.process_time() - begin < 1.0
    assert left_out


def test_alternatives_as_many_as_are_compared_are_told_apart_by_their_last_property():
    schemas = [
        {
            "type": "object",
            "required": ["a", "b", "kind"],
            "properties": {"a": {}, "b": {}, "kind": {"const": f"number {number}"}},
        }
        for number in range(MAX_SCHEMAS)
    ]
    assert "anyOf" in fit_schema({"oneOf": schemas}, "response_format", True)


def test_union_of_pydantic_loses_nothing():
    fitted = fit_schema(Owner.model_json_schema(), "response_format", strict=True)
    assert "anyOf" in fitted["properties"]["pet"]


def test_exclusion_that_is_lost_is_named():
    schema, left_out = {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, []
    assert "anyOf" in fit_schema(schema, "response_format", False, left_out)["properties"]["a"]
    assert left_out == ["response_format: a grammar cannot enforce the exclusion of oneOf (at a); these were ignored"]
    assert "oneOf" in fit_schema(schema, "response_format", True)["properties"]["a"]
