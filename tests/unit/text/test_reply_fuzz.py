"""Whatever a model writes: replies read the same however they are cut, nothing is lost, and time is linear."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_reading import calls, events, oracle, parse
from reply_samples import ANSWERS, ARGUMENTS, GLM_TAGS, ONE_CALL, TAGS, THOUGHTS

from labinfer.text.reply_format import built_in_names
from labinfer.text.reply_parts import join_events

FORMATS = built_in_names()

FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", ">", "<function=f>", "</function>"),
    *("<parameter=city>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f", "<response>"),
    *("<minimax:tool_call>", "<invoke name=", "</invoke>", "</minimax:tool_call>", "</response>", '"', "\\"),
    *("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[TOOL_CALLS]"),
    *("[ARGS]", "[THINK]", "[/THINK]", "<|channel|>", "analysis", "final", "commentary to=functions.f", "<|message|>"),
    *("<|start|>assistant", "<|end|>", "<|call|>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json"),
    *("```", "<｜tool▁call▁end｜>", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">'),
    *("</｜DSML｜parameter>", "</｜DSML｜invoke>", "[{", "]", "{}", "}", "}}", '{"name": "f", "arguments": {'),
    *("\n", " ", "<", "</", "WORD", "é🦊", "\x00", '{"name": "f", "parameters": {}}', "<|python_tag|>"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=16).map("".join)


@st.composite
def cut_texts(draw) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), cut_texts(), st.sampled_from(["", "<think>\n"]))
def test_however_a_text_is_cut_it_reads_the_same(name, pieces, prompt):
    text = "".join(pieces)
    whole = parse(name, text, prompt)
    assert join_events(events(name, pieces, prompt)) == join_events(events(name, list(text), prompt)) == whole
    for call in whole.calls:
        assert call.name and isinstance(json.loads(call.arguments), dict)


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), TEXTS)
def test_where_transformers_reads_a_text_thoughts_are_the_same(name, text):
    try:
        thoughts, content, found = oracle(name, text)
    except (ValueError, KeyError, RecursionError):
        return  # what is broken is text here
    reply = parse(name, text)
    marks = ("tool_call", "TOOL_CALLS", "DSML")  # of a call that is none, which here is no end of a thought
    if not found and calls(reply) == found and not any(mark in text for mark in marks):
        assert reply.reasoning == thoughts
        assert reply.content.strip() == content


@settings(max_examples=100)
@given(st.sampled_from(FORMATS), st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_nothing_is_lost_and_nothing_comes_twice(name, pieces):
    reply = parse(name, "".join(pieces), tools=[])
    shown = reply.reasoning + reply.content
    for word in ("WORD", "é🦊"):
        assert shown.count(word) == "".join(pieces).count(word)


HOSTILE = [
    *(
        "<tool_call>",
        '<tool_call>{"',
        "<think></think>",
        "<function=f>",
        "<parameter=a>",
        "</tool_call>",
        " ",
        "\n\n",
        '"',
    ),
    *(
        "<tool_call>f<arg_key>",
        "<arg_key>a",
        "<invoke name=f>",
        "[TOOL_CALLS]f[ARGS]{",
        "<|channel|>",
        "{",
        "<response>",
    ),
    *(
        '<tool_call>{"a": "</tool_call>',
        "<tool_call>{<tool_call>{</tool_call>",
        "<think><tool_call>{",
        "to=functions.f ",
    ),
    *("<|start|>assistant", "<|end|><|start|>assistant", '{"name": "f", ', '<｜DSML｜invoke name="f">'),
    *("<function=f><parameter=a>1</parameter></function>", "<function=f><parameter=a></function>"),
]


@pytest.mark.timing
@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_takes_linear_time(piece):
    text = piece * (30_000 // len(piece))
    for name in FORMATS:
        begin = time.process_time()
        parse(name, text)
        assert time.process_time() - begin < 2
    begin = time.process_time()
    pieces = [text[at : at + 5] for at in range(0, 20_000, 5)]
    events("qwen_xml", pieces)
    events("hermes", ["<tool_call>", *pieces])
    assert time.process_time() - begin < 8


@pytest.mark.parametrize("name", FORMATS)
def test_text_longer_than_the_window_reads_the_same(name):
    filler = "word < 5 " * 700
    thought, _ = THOUGHTS.get(name, ("", ""))
    answer, content = ANSWERS.get(name, ("It is.", "It is."))
    text = thought.replace("It < 5", filler) + answer.replace("It is", f"{filler}It is")
    reply = parse(name, text)
    assert reply.content == content.replace("It is", f"{filler}It is") and (
        not thought or reply.reasoning == f"{filler}, so"
    )
    long = ARGUMENTS.replace("Paris", filler), TAGS.replace("Paris", filler), GLM_TAGS.replace("Paris", filler)
    if name in ("hermes", "qwen_xml", "glm"):
        text = ONE_CALL[name]
        for short, one in zip((ARGUMENTS, TAGS, GLM_TAGS), long, strict=True):
            text = text.replace(short, one)
        assert calls(parse(name, text))[0][1]["city"] == filler
