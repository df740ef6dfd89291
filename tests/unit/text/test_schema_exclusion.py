"""Alternatives of ``oneOf``: which exclude each other for certain."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
import pytest

from labinfer.text.json_schema import fit_schema
from labinfer.text.schema_exclusion import MAX_SCHEMAS, exclude_each_other


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
    assert exclude_each_other(schemas, LOOP) is excluded


def test_union_of_pydantic_loses_nothing():
    fitted = fit_schema(Owner.model_json_schema(), "response_format", strict=True)
    assert "anyOf" in fitted["properties"]["pet"]


def test_exclusion_that_is_lost_is_named():
    schema, left_out = {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, []
    assert "anyOf" in fit_schema(schema, "response_format", False, left_out)["properties"]["a"]
    assert left_out == ["response_format: a grammar cannot hold the exclusion of oneOf (at a), which were left out"]
    assert "oneOf" in fit_schema(schema, "response_format", True)["properties"]["a"]
