"""Replies that ``max_tokens`` cuts off in a call: the call has the arguments so far, and its marks are never content."""

from __future__ import annotations

import json
import random

import pytest
from reply_reading import built_in, parse
from reply_samples import ONE_CALL, THOUGHTS, TOOLS, TWO_CALLS

from labinfer.text.cut_values import read_cut_json
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.reply_parts import Event, Reply, join_events

FORMATS = sorted(ONE_CALL)


def cut_events(name: str, pieces: list[str], prompt: str = "", **options) -> list[Event]:
    options = {"tools": TOOLS, "make_id": lambda: "an id"} | options
    parser = ReplyParser(built_in(name).template, prompt, **options)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish(is_cut=True)


def cut(name: str, text: str, **options) -> Reply:
    return join_events(cut_events(name, [text], **options))


def check_calls(reply: Reply, whole: Reply) -> None:
    """Calls that are those of the whole reply, up to where it was cut off."""
    assert len(reply.calls) <= len(whole.calls)
    for number, (call, other) in enumerate(zip(reply.calls, whole.calls, strict=False), 1):
        assert call.name == other.name
        assert (call.arguments + call.closing == other.arguments) or other.arguments.startswith(call.arguments)
        assert isinstance(json.loads(call.arguments + call.closing), dict)
        assert not call.closing or number == len(reply.calls)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_cut_anywhere_are_calls_and_no_content(name):
    thought, thought_text = THOUGHTS.get(name, ("", ""))
    text = thought + TWO_CALLS.get(name, ONE_CALL[name])
    text = text.replace("Paris", 'Pa\\"ris' if name not in PLAIN_STRINGS else "Pa ris")
    whole, numbers = parse(name, text), []
    for end in range(len(thought), len(text) + 1):
        reply = cut(name, text[:end])
        assert (reply.reasoning, reply.content) == (thought_text, ""), text[:end]
        check_calls(reply, whole)
        if end % 7 == 0:
            assert join_events(cut_events(name, list(text[:end]))) == reply
        numbers.append(len(reply.calls))
    assert numbers == sorted(numbers)
    assert numbers[0] == 0 and numbers[-1] == len(whole.calls)
    assert reply.calls == whole.calls


PLAIN_STRINGS = {"qwen_xml", "glm", "minimax", "deepseek_v32", "gemma4"}
"""Formats whose strings have no escapes."""


@pytest.mark.parametrize("name", FORMATS)
def test_string_that_is_cut_off_is_told_to_its_end(name):
    text = ONE_CALL[name]
    begin = text.index("Paris")
    for count in range(1, 6):
        (call,) = cut(name, text[: begin + count]).calls
        assert (call.name, call.arguments) == ("weather", '{"city": "' + "Paris"[:count])
        assert call.closing == '"}'


@pytest.mark.parametrize("name", FORMATS)
def test_number_that_is_cut_off_is_left_out(name):
    text = ONE_CALL[name]
    (call,) = cut(name, text[: text.rindex("3") + 1]).calls
    assert (call.arguments, call.closing) == ('{"city": "Paris"', "}")


@pytest.mark.parametrize("name", FORMATS)
def test_reply_that_the_model_ends_in_a_call_is_text_as_before(name):
    text = ONE_CALL[name]
    text = text[: text.index("Paris") + 2]
    reply = parse(name, text)
    assert (reply.content, reply.calls) == (text, [])


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_a_reply_that_is_cut_off_is_text(name):
    text = ONE_CALL[name]
    for end in range(len(text)):
        reply = cut(name, text[:end], tools=[])
        assert reply == parse(name, text[:end], tools=[])


def test_beginning_of_a_mark_that_is_cut_off_is_left_out_and_other_text_is_not():
    assert cut("hermes", "Look:\n<tool_ca") == Reply("", "Look:\n", [])
    assert cut("hermes", "Look: <tool_box") == Reply("", "Look: <tool_box", [])
    assert cut("hermes", "a < b") == Reply("", "a < b", [])
    assert cut("hermes", "Look:\n<tool_call>\nnonsense") == Reply("", "Look:\n<tool_call>\nnonsense", [])
    assert cut("qwen_xml", "Look:\n<function=weather>\nnonsense").content == "Look:\n<function=weather>\nnonsense"


@pytest.mark.parametrize("name", ["hermes", "kimi", "qwen_xml"])
def test_one_call_alone_is_told_where_calls_are_not_parallel(name):
    text = TWO_CALLS[name]
    for end in range(len(text)):
        assert len(cut(name, text[:end], parallel=False).calls) <= 1


@pytest.mark.parametrize(
    ("text", "value", "closing"),
    [
        ("", {}, "{}"),
        (" {", {}, "}"),
        ('{"a', {}, "}"),
        ('{"a"', {}, "}"),
        ('{"a":', {}, "}"),
        ('{"a": 1', {}, "}"),
        ('{"a": 1,', {"a": 1}, "}"),
        ('{"a": tru', {}, "}"),
        ('{"a": true', {"a": True}, "}"),
        ('{"a": [1, 2', {"a": [1]}, "]}"),
        ('{"a": [1, {"b": "x\\', {"a": [1, {"b": "x"}]}, '"}]}'),
        ('{"a": "\\u4f', {"a": ""}, '"}'),
        ('{"a": "\\u4f60\\ud83d', {"a": "你"}, '"}'),
        ('{"a": "\\\\\\\\u', {"a": "\\\\u"}, '"}'),
        ('{"a": "", "b": ""', {"a": "", "b": ""}, "}"),
        ('{"a": {}} and more', {"a": {}}, ""),
        ('[{"a": 1}, {"a": "x', [{"a": 1}, {"a": "x"}], '"}]'),
    ],
)
def test_json_that_is_cut_off_is_read_as_far_as_it_goes(text, value, closing):
    read = read_cut_json(text)
    assert (read.value, read.closing) == (value, closing)


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_replies_raise_nothing_and_do_not_depend_on_pieces(name):
    rng = random.Random(name)
    for _ in range(60):
        text = list(
            rng.choice([ONE_CALL[name], TWO_CALLS.get(name, "x"), THOUGHTS.get(name, ("x",))[0] + ONE_CALL[name]])
        )
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 3)] = rng.choices('{}[]"\\,: <>/ax1\n', k=rng.randint(0, 2))
            text = text or ["x"]
        whole = "".join(text)[: rng.randint(1, len(text))]
        reply = cut(name, whole)
        assert join_events(cut_events(name, list(whole))) == reply
        for call in reply.calls:
            assert isinstance(json.loads(call.arguments + call.closing), dict)


@pytest.mark.parametrize(
    "text", ["x", '"a"', "[}", '{"a": "\n', '{"a": "\\x', '{"a" 1, "b": 2,', "[" * 100_000, '{"a": 1, "b": 2, "a": "x']
)
def test_what_does_not_begin_as_json_is_refused(text):
    with pytest.raises(ValueError):
        read_cut_json(text)
