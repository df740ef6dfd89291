"""Calls in replies, and what is none: it stays text, to the last character."""

from __future__ import annotations

import json
import re

import pytest
from reply_reading import calls, check_every_cut, events, oracle, parse
from reply_samples import ONE_CALL, TOOLS, TWO_CALLS

from labinfer.text.reply_format import load_built_in
from labinfer.text.reply_parts import Reply, join_events

CALLED = [("weather", {"city": "Paris", "days": 3})]
CLOSINGS = {
    "qwen_xml": "</function>",
    "minimax": "</invoke>",
    "glm": "</tool_call>",
    "deepseek_v32": "</｜DSML｜invoke>",
}
"""Marks that end a call whose arguments are tags."""


# What is no call. Transformers raises errors here, or makes a call of what was cut off; here it is text.


@pytest.mark.parametrize("name", sorted(ONE_CALL))
def test_call_that_is_cut_off_is_content_to_the_last_character(name):
    text = ONE_CALL[name]
    closing = CLOSINGS.get(name)
    last = text.index(closing) + len(closing) - 1 if closing else text.rindex("}")
    for end in range(1, last):
        assert parse(name, text[:end]) == Reply("", text[:end], [])


TAGS = {name: text for name, text in ONE_CALL.items() if name in CLOSINGS}
"""A call in each of the formats whose arguments are tags."""


@pytest.mark.parametrize("name", sorted(TAGS))
def test_call_with_a_tag_that_is_not_closed_is_content_to_the_last_character(name):
    ending = next(mark for mark in ("</parameter>", "</arg_value>", "</｜DSML｜parameter>") if mark in TAGS[name])
    for text in (
        TAGS[name].replace(ending, "", 1),  # the first one's, whose value would have the second argument in it
        "".join(TAGS[name].rsplit(ending, 1)),  # the last one's, which would be missing
        TAGS[name].replace(ending, "", 1).replace(ending, ""),
        TAGS[name].replace("\n", "\nnoise ", 2),
    ):
        for every in (text, text + "\n" + TAGS[name]):
            reply = check_every_cut(name, every)
            assert (reply.content, calls(reply)) == (text, CALLED * (every != text))


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"a": [1, null]}', {"a": [1, None]}), ("3", 3), ("true", True), ('"3"', "3"), ("two", "two"), ("", "")],
)
def test_tag_that_says_it_is_no_string_has_json_without_a_schema(text, value):
    call = TAGS["deepseek_v32"].replace("weather", "unknown").replace(">3<", f">{text}<")
    assert calls(check_every_cut("deepseek_v32", call)) == [("unknown", {"city": "Paris", "days": value})]


@pytest.mark.parametrize("name", ["glm"])
def test_key_without_a_value_is_content_to_the_last_character(name):
    text = "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>"
    assert parse(name, text) == Reply("", text, [])


BROKEN = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "Write <tool_call> and </tool_call> around it.",
    "a < b <tool_cal",
    "</tool_call>\n",
    "<tool_call>\n{}\n</tool_call>",
    '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": "x"}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {"a": 1e999}}\n</tool_call>',
    '<tool_call>\n{"name": "f" "arguments": {}}\n</tool_call> and on',
    '<tool_call>\n{"name": "f\n", "arguments": {}}\n</tool_call>',
    "<tool_call>\n" + "[" * 100_000,
    '<tool_call>\n{"a": ' + "[" * 100_000 + "</tool_call>",
]


@pytest.mark.parametrize("text", BROKEN)
def test_broken_call_is_content_to_the_last_character(text):
    assert parse("hermes", text) == Reply("", text, [])


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<tool_call>oops " + CALL, "<tool_call>oops"),
        ("<tool_call>\n" + CALL, "<tool_call>"),
        ('<tool_call>\n{"name": "f",\n' + CALL, '<tool_call>\n{"name": "f",'),
        (CALL + "\n<tool_call>\n{]\n</tool_call>", "<tool_call>\n{]\n</tool_call>"),
        (f'<tool_call>{{"a": {CALL} done', '<tool_call>{"a":\ndone'),
    ],
)
def test_call_is_found_after_one_that_failed(text, content):
    reply = check_every_cut("hermes", text)
    assert (reply.content, calls(reply)) == (content, [("now", {})])


@pytest.mark.parametrize(
    ("name", "text", "thought"),
    [
        ("hermes", "<think>use <tool_call> {tags}</think>Hi.", "use <tool_call> {tags}"),
        (
            "hermes",
            '<think>{<tool_call>{"name": ""}</tool_call> no</think>Hi.',
            '{<tool_call>{"name": ""}</tool_call> no',
        ),
        ("qwen_xml", "<think>use <tool_call> and so</think>Hi.", "use <tool_call> and so"),
        ("glm", "<think>use <tool_call> or<arg_key></think>Hi.", "use <tool_call> or<arg_key>"),
    ],
)
def test_thought_goes_on_behind_what_is_no_call(name, text, thought):
    assert parse(name, text) == Reply(thought, "Hi.", [])


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"a": [1, {"b": []}], "c": "}]{["}',
        r'{"quote": "\"", "slash": "\\", "both": "\\\"}"}',
        '{"tags": "<tool_call></tool_call>"}',
        '{"tags": "\\\\</tool_call>\\""}',
        '{"city": "日本 🦊 é"}',
        r'{"surrogate": "\ud800"}',
    ],
)
def test_arguments_come_back_as_they_were_meant(arguments):
    text = f'a\n<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\n' * 2
    reply = parse("hermes", text)
    assert (reply.content, calls(reply)) == ("a\na", [("f", json.loads(arguments))] * 2)
    for call in reply.calls:
        call.arguments.encode()


def test_texts_are_read_by_the_schema():
    values = {"city": "5", "days": "3.0", "exact": "True", "places": '["a", 1]', "limit": "null", "other": "7"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=weather>\n{tags}</function>\n</tool_call>"
    reply = parse("qwen_xml", text)
    expected = {"city": "5", "days": 3, "exact": True, "places": ["a", 1], "limit": None, "other": "7"}
    assert calls(reply) == [("weather", expected)] == oracle("qwen_xml", text)[2]
    broken = text.replace("3.0", "three").replace('["a", 1]', "[a")
    assert calls(parse("qwen_xml", broken)) == oracle("qwen_xml", broken)[2]


@pytest.mark.parametrize("name", sorted(ONE_CALL))
def test_without_tools_calls_are_text(name):
    text = "A: " + ONE_CALL[name]
    assert parse(name, text, tools=[]) == Reply("", text, [])


def test_without_parallel_calls_the_first_one_ends_the_reply():
    for name, text in TWO_CALLS.items():
        assert calls(parse(name, text, parallel=False)) == CALLED
    assert parse("hermes", "No call.\n", parallel=False) == Reply("", "No call.\n", [])


def test_ids_are_those_of_the_format():
    ids = [call.id for call in join_events(events("kimi", [TWO_CALLS["kimi"]])).calls]
    assert ids == ["functions.weather:0", "functions.weather:1"]
    parser = load_built_in("hermes").parser("", TOOLS, True)
    found = [event.id for event in parser.feed(ONE_CALL["hermes"] * 3) + parser.finish()]
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in found) and len(set(found)) == 3
    parser = load_built_in("mistral").parser("", TOOLS, True)
    assert re.fullmatch("[a-zA-Z0-9]{9}", (parser.feed(ONE_CALL["mistral"]) + parser.finish())[0].id)
