"""The form of answers as users ask for it: exactly one, in its bounds; in JSONL lines, batch bodies and from Python."""

from __future__ import annotations

import json

import msgspec
import pytest

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.structured_outputs import MAX_GRAMMAR_LENGTH, MAX_OPTIONS, StructuredOutputs
from labinfer.requests.jsonl import SimpleLine, parse_line
from labinfer.requests.protocol import CHAT_URL, COMPLETIONS_URL, ChatBody, CompletionBody

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}, "required": ["b"]}
FORMS = [
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": "[0-9]+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'start: "a"'},
]


def parse(line):
    return parse_line(json.dumps(line).encode(), SamplingParams(max_tokens=7))


def line_of(kind, **fields):
    if kind == "simple":
        return {"prompt": "hi"} | fields
    asked = {"prompt": "hi"} if kind == COMPLETIONS_URL else {"messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": "c", "method": "POST", "url": kind, "body": asked | fields}


def cyclic():
    found = {}
    found["properties"] = found
    return found


@pytest.mark.parametrize("form", FORMS)
def test_one_form_is_accepted_and_named(form):
    (name,) = form
    assert StructuredOutputs(**form).kind == name


@pytest.mark.parametrize("text", [json.dumps(SCHEMA), json.dumps(SCHEMA, indent=3)])
def test_schema_may_be_text_and_keeps_the_order_of_its_keys(text):
    schema = StructuredOutputs(json=text).json
    assert schema == SCHEMA and list(schema["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, not none"),
        ({"regex": "a", "json_object": True}, "not json_object and regex"),
        ({"json_object": False}, "json_object must be true"),
        ({"json_object": 1}, "json_object must be true"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": "[1]"}, "json must be a JSON schema, an object"),
        ({"json": [1]}, "json must be a JSON schema, an object"),
        ({"json": "[" * 10_000}, "json is not valid JSON"),
        ({"json": {"type": object()}}, "json cannot be written as JSON"),
        ({"json": cyclic()}, "json cannot be written as JSON"),
        ({"json": {"const": "\ud800"}}, "json cannot be written as JSON"),
        ({"json": {"const": "x" * MAX_GRAMMAR_LENGTH}}, "json may have 65536 characters at most, not 65548"),
        ({"regex": ""}, "regex must be text"),
        ({"regex": 5}, "regex must be text"),
        ({"regex": "\ud800"}, "regex is not valid Unicode"),
        ({"regex": "x" * (MAX_GRAMMAR_LENGTH + 1)}, "regex may have"),
        ({"grammar": "x" * (MAX_GRAMMAR_LENGTH + 1)}, "grammar may have"),
        ({"choice": []}, "choice must be a list of strings"),
        ({"choice": "yes"}, "choice must be a list of strings"),
        ({"choice": ["yes", ""]}, "choice must be text"),
        ({"choice": ["yes", 5]}, "choice must be text"),
        ({"choice": ["x"] * (MAX_OPTIONS + 1)}, "choice may have 1024 strings at most, not 1025"),
        ({"choice": ["x" * 1000] * 100}, "choice may have 65536 characters at most, not 100000"),
    ],
)
def test_anything_else_is_refused_by_name(fields, says):
    with pytest.raises(UserError, match=says) as caught:
        StructuredOutputs(**fields)
    assert len(str(caught.value)) < 300


def test_longest_texts_are_accepted():
    assert StructuredOutputs(regex="x" * MAX_GRAMMAR_LENGTH)
    assert StructuredOutputs(choice=["x"] * MAX_OPTIONS).choice == ("x",) * MAX_OPTIONS


@pytest.mark.parametrize("form", FORMS)
def test_sampling_params_survive_the_way_to_another_process(form):
    params = SamplingParams(structured_outputs=StructuredOutputs(**form))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ignore_eos": True}, "ignore_eos cannot be combined with structured_outputs"),
        ({"num_beams": 2}, "structured_outputs .* cannot be combined with num_beams"),
        ({"structured_outputs": "a"}, "structured_outputs must be StructuredOutputs"),
        ({"structured_outputs": {"pattern": "a"}}, "structured_outputs has no field .pattern.; its fields are"),
    ],
)
def test_sampling_params_refuse_what_does_not_go_together(fields, says):
    with pytest.raises(UserError, match=says):
        SamplingParams(**{"structured_outputs": StructuredOutputs(regex="a")} | fields)


# Lines and bodies.

KINDS = ["simple", COMPLETIONS_URL, CHAT_URL]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_line_may_ask_for_a_form(kind, form):
    assert parse(line_of(kind, structured_outputs=form)).sampling.structured_outputs == StructuredOutputs(**form)


@pytest.mark.parametrize("kind", KINDS)
def test_no_form_is_the_default(kind):
    assert parse(line_of(kind)).sampling.structured_outputs is None
    assert parse(line_of(kind, structured_outputs=None)).sampling.structured_outputs is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"regex": ""}, "regex"),
        ({"regex": 5}, "regex"),
        ({"regexp": "a"}, "regexp"),
        ({"choice": ["a", 5]}, "choice"),
        ({"choice": "a"}, "choice"),
        ({"json": "nonsense"}, "valid JSON"),
        ({"json": []}, "json"),
        ({"json_object": "yes"}, "json_object"),
        ({"grammar": "x" * (MAX_GRAMMAR_LENGTH + 1)}, "65536"),
        ("[0-9]", "structured_outputs"),
    ],
)
def test_form_that_is_none_is_refused_with_its_place(kind, form, says):
    with pytest.raises(UserError, match=says) as caught:
        parse(line_of(kind, structured_outputs=form))
    assert "structured_outputs" in str(caught.value) and len(str(caught.value)) < 400


URLS = [COMPLETIONS_URL, CHAT_URL]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("wanted", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "n-1", "schema": SCHEMA}},
            {"json": SCHEMA | {"x-guidance": {"lenient": True, "coerce_one_of": True}}},
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True, "description": "what"},
            },
            {"json": SCHEMA},
        ),
    ],
)
def test_response_format_is_openais_way_to_ask(url, wanted, form):
    expected = StructuredOutputs(**form) if form else None
    assert parse(line_of(url, response_format=wanted)).sampling.structured_outputs == expected


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"type": "xml"}, "xml"),
        ({}, "type"),
        ("json_object", "response_format"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "name"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}, "name"),
        ({"type": "json_schema", "json_schema": {"name": "n" * 129, "schema": SCHEMA}}, "name"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": "x"}}, "schema"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "x" * 70_000}}}, "65536"),
        ({"type": "text", "json_schema": {}}, "json_schema"),
    ],
)
def test_response_format_that_is_none_is_refused(url, wanted, says):
    with pytest.raises(UserError, match=says):
        parse(line_of(url, response_format=wanted))


@pytest.mark.parametrize("url", URLS)
def test_form_is_asked_for_in_one_way_only(url):
    with pytest.raises(UserError, match="leave one out"):
        parse(line_of(url, response_format={"type": "json_object"}, structured_outputs={"json_object": True}))
    both = line_of(url, response_format={"type": "text"}, structured_outputs={"json_object": True})
    assert parse(both).sampling.structured_outputs == StructuredOutputs(json_object=True)


@pytest.mark.parametrize("kind", [SimpleLine, CompletionBody, ChatBody])
def test_schema_of_the_schema_has_the_bounds(kind):
    _, components = msgspec.json.schema_components([kind])
    text = components["StructuredOutputs"]["properties"]["regex"]["anyOf"][0]
    assert text == {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_LENGTH}


@pytest.mark.parametrize("kind", [COMPLETIONS_URL, CHAT_URL])
def test_line_says_what_was_left_out_of_its_schema(kind):
    def warnings(**schema):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        return parse(line_of(kind, response_format=form)).warnings

    assert warnings(type="array", uniqueItems=True) == (
        "response_format: a grammar cannot enforce uniqueItems; these were ignored",
    )
    assert warnings(type="array") == ()
