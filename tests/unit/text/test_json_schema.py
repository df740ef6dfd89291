"""JSON schemas as zod and pydantic write them, and what answers by them look like."""

from __future__ import annotations

import decimal
import enum
import json
import uuid
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

import labinfer
from labinfer.base.errors import UserError
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.text.guidance import grammar_source
from labinfer.text.json_schema import fit_schema
from labinfer.text.tokenizer import Tokenizer

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
OBJECT = {"type": "object", "additionalProperties": False}


@pytest.fixture(scope="module")
def matches():
    """A function that says whether an answer by a schema may be this value, written as ``json.dumps`` does."""
    tokenizer, library = Tokenizer(DEMO), LLTokenizer(str(DEMO / "tokenizer.json"))

    def match(schema: dict, value, strict: bool = False, left_out: list | None = None) -> bool:
        fitted = fit_schema(schema, "response_format", strict, left_out)
        matcher = LLMatcher(library, grammar_source(StructuredOutputs(json=fitted)))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
        return all(map(matcher.consume_token, ids)) and matcher.is_accepting()

    return match


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(gt=0, le=9)] = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    friend: Dog | None = None


class Order(pydantic.BaseModel):
    """Somebody's order."""

    model_config = pydantic.ConfigDict(extra="forbid")

    id: uuid.UUID
    when: datetime
    colour: Colour = Colour.RED
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    place: tuple[int, str]
    note: str | None = pydantic.Field(default=None, title="A note", examples=["x"], max_length=5)
    counts: dict[str, int] = {}
    code: Annotated[str, pydantic.Field(pattern="^[A-Z]{2}$")] = "AB"


ORDER = {
    "id": "12345678-1234-4234-8234-123456789abc",
    "when": "2024-01-02T03:04:05Z",
    "colour": "blue",
    "pet": {"kind": "cat", "lives": 3},
    "place": [4, "x"],
    "note": None,
    "counts": {"a": 1},
    "code": "XY",
}
WRONG = {
    "colour": "green",
    "pet": {"kind": "cat", "lives": 0},
    "place": [4],
    "note": "too long",
    "code": "x",
    "id": "1",
}


def test_model_of_pydantic_is_kept_to(matches):
    schema, left_out = Order.model_json_schema(), []
    assert matches(schema, ORDER, left_out=left_out) and not left_out
    assert matches(schema, ORDER | {"pet": {"kind": "dog", "friend": {"kind": "dog", "friend": None}}})
    for name, value in WRONG.items():
        assert not matches(schema, ORDER | {name: value}), name


ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "description": "who", "default": "x"},
        "age": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "mail": {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        "tags": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "boolean"}],
            "items": False,
            "minItems": 2,
        },
        "either": {"anyOf": [{"const": "a"}, {"type": "null"}]},
    },
    "required": ["name", "age", "mail", "tags", "pair", "either"],
    "additionalProperties": False,
}


def test_schema_of_zod_is_kept_to_but_for_what_is_named(matches):
    value = {"name": "Ann", "age": 3, "mail": "a@b.de", "tags": {"x": 1}, "pair": ["a", True], "either": None}
    left_out: list[str] = []
    assert matches(ZOD, value, left_out=left_out)
    (sentence,) = left_out
    assert sentence.startswith("response_format: a grammar cannot enforce pattern ") and "(at mail)" in sentence
    for name, wrong in {"age": 0, "mail": "x", "tags": {"x": "y"}, "pair": ["a", 1], "either": "b"}.items():
        assert not matches(ZOD, value | {name: wrong}), name
    with pytest.raises(
        UserError, match=r"response_format: strict is true, but a grammar cannot enforce pattern .* \(at mail\)"
    ):
        fit_schema(ZOD, "response_format", strict=True)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "null"}}, [1, None], [1, 2]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 4, 3),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, 3, 2),
        ({"type": "string", "nullable": True, "enum": ["a"]}, None, "b"),
        ({"definitions": {"A": {"type": "null"}}, "$ref": "#/definitions/A"}, None, 1),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1, "a"),
        ({"$id": "https://a/b", "title": "T", "x-order": 3, "type": "null"}, None, 1),
        (OBJECT | {"properties": {"a": {"not": {}}, "b": {"type": "null"}}}, {"b": None}, {"c": 1}),
        ({"type": "string", "contentEncoding": "base64", "readOnly": True}, "YQ==", 5),
    ],
    ids=str,
)
def test_older_forms_and_annotations_are_read(matches, schema, good, bad):
    assert matches(schema, good) and not matches(schema, bad)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {"type": "null"}}, "contains"),
        ({"not": {"type": "null"}}, "not"),
        ({"if": {}, "then": {}}, "if, then"),
        ({"format": "cuid2"}, "format 'cuid2'"),
        ({"pattern": r"(a)\1"}, "pattern "),
        ({"$ref": "https://example.com/x.json"}, "[$]ref 'https"),
        ({"properties": {"a": {"items": {"propertyNames": {"minLength": 2}}}}}, r"propertyNames \(at a.items\)"),
        ({f"{name}Schemas": {} for name in ("dependent",)}, "dependentSchemas"),
    ],
    ids=str,
)
def test_what_no_grammar_holds_is_named(matches, keywords, named):
    left_out: list[str] = []
    assert matches(keywords, {}, left_out=left_out)
    with pytest.raises(UserError, match=f"cannot enforce {named}") as caught:
        fit_schema(keywords, "response_format", strict=True)
    assert len(left_out) == 1 and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("float", "number"),
        ("double", "number"),
        ("int", "integer"),
        ("bool", "boolean"),
        ("STRING", "string"),
        ("dict", "object"),
        (["str", "null"], ["string", "null"]),
    ],
)
def test_types_of_programming_languages_are_read(given, meant):
    schema = {"type": "object", "properties": {"x": {"type": given}}, "required": None, "enum": None, "items": None}
    fitted = fit_schema(schema, "tools", strict=True)
    assert fitted == {"type": "object", "properties": {"x": {"type": meant}}}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["text", "flaot", 5, ["string", {}]])
def test_unknown_type_is_named_with_its_place(kind, strict):
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": kind}}}}
    with pytest.raises(UserError, match=r"^tools: parameters of 'f': unknown type .* \(at x.items\); use one of array"):
        fit_schema(schema, "tools: parameters of 'f'", strict)


def test_const_may_be_null():
    assert fit_schema({"const": None, "default": None}, "tools", strict=True) == {"const": None}


COUNTED = [
    ({"minProperties": 2}, True),
    ({"minProperties": 2, "additionalProperties": {"type": "integer"}}, True),
    ({"minProperties": 2, "patternProperties": {"^[ab]$": {}}, "additionalProperties": False}, True),
    ({"minProperties": 3, "properties": {"a": {}}, "required": ["a"]}, True),
    ({"minProperties": 3, "properties": {"a": {}}, "required": ["a", "a"]}, True),
    ({"minProperties": 1}, False),
    ({"minProperties": 2, "properties": {"a": {}}, "required": ["a"]}, False),
    ({"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False}, True),
    ({"minProperties": 1, "properties": {"a": {}, "b": {}}, "additionalProperties": False}, False),
    ({"properties": {"minProperties": {"type": "integer"}}}, False),
]


@pytest.mark.parametrize(("keywords", "can_repeat"), COUNTED)
def test_properties_are_not_counted_by_repeated_names(matches, keywords, can_repeat):
    schema, left_out = {"type": "object"} | keywords, []
    assert matches(schema, {"a": 1, "b": 2}, left_out=left_out) or not can_repeat
    assert any("minProperties" in text for text in left_out) == can_repeat
    inside = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}]}, "$defs": {"x": schema}}
    for whole in (schema, inside):
        if can_repeat:
            with pytest.raises(UserError, match="cannot enforce minProperties"):
                fit_schema(whole, "response_format", strict=True)
            with pytest.raises(UserError, match="structured_outputs.json: a grammar cannot enforce minProperties"):
                grammar_source(StructuredOutputs(json=whole))
        else:
            fit_schema(whole, "response_format", strict=True)
            grammar_source(StructuredOutputs(json=whole))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("keywords", [keywords for keywords, can_repeat in COUNTED if not can_repeat])
def test_repeated_name_is_no_second_property(keywords, strict):
    """As far as llguidance takes the schema."""
    tokenizer, library = Tokenizer(DEMO), LLTokenizer(str(DEMO / "tokenizer.json"))
    fitted = fit_schema({"type": "object"} | keywords, "response_format", strict)
    matcher = LLMatcher(library, grammar_source(StructuredOutputs(json=fitted)), log_level=0)
    ids = tokenizer.encode('{"a": 1, "a": 2}', add_special_tokens=False)
    is_taken = not matcher.is_error() and all(map(matcher.consume_token, ids)) and matcher.is_accepting()
    assert not is_taken or keywords.get("minProperties", 0) < 2


def test_uniqueness_of_names_says_nothing_of_strings():
    for nothing in ({"propertyNames": {"type": "string"}}, {"uniqueItems": False}, {"discriminator": {}}):
        assert fit_schema(nothing, "f", strict=True) == {}


def test_decimal_of_pydantic_is_a_number_or_text(matches):
    class Price(pydantic.BaseModel):
        amount: decimal.Decimal

    schema = Price.model_json_schema()
    assert matches(schema, {"amount": 5}) and matches(schema, {"amount": "5.00"})
    assert not matches(schema, {"amount": None})


def test_schema_that_is_too_deep_is_refused():
    schema: dict = {}
    for _ in range(70):
        schema = {"items": schema}
    with pytest.raises(UserError, match="response_format: the schema is nested"):
        fit_schema(schema, "response_format", strict=False)
