"""Parts of replies: those of Transformers on the whole text, however it is cut."""

from __future__ import annotations

import pytest
from reply_reading import calls, check_every_cut, events, oracle, parse, parts
from reply_samples import ANSWERS, ONE_CALL, THOUGHTS, TOOLS, TWO_CALLS, replies

from labinfer.text.detokenizer import Detokenizer
from labinfer.text.reply_format import built_in_names, load_built_in
from labinfer.text.reply_parser import ReplyParser
from labinfer.text.reply_parts import Content, Reasoning, Reply, ToolCall, join_events
from labinfer.text.response_template import ResponseTemplate
from labinfer.text.tokenizer import Tokenizer
from labinfer.weights.resolve import resolve_model

FORMATS = built_in_names()
CALLED = [("weather", {"city": "Paris", "days": 3})]


@pytest.fixture(scope="module")
def demo():
    return Tokenizer(resolve_model("demo", "", may_download=False))


# Beside Transformers.


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in FORMATS for text in replies(name)])
def test_parts_are_those_of_transformers_however_the_text_is_cut(name, text):
    assert parts(check_every_cut(name, text)) == oracle(name, text)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_a_stream_whose_tokens_are_bytes_are_those_of_the_whole_text(name, demo):
    byte_tokens = {demo.token_text(token_id).bytes: token_id for token_id in range(demo.vocab_size)}
    for text in replies(name):
        parser = ReplyParser(load_built_in(name).template, tools=TOOLS, make_id=lambda: "an id")
        detokenizer, found = Detokenizer(demo.reply_decoder()), []
        for byte in text.encode():
            detokenizer.add(byte_tokens[byte,])
            found += parser.feed(detokenizer.take_new())
        detokenizer.finish()
        found += parser.feed(detokenizer.take_new()) + parser.finish()
        assert join_events(found) == parse(name, text)


@pytest.mark.parametrize("name", FORMATS)
def test_samples_say_what_they_are_meant_to(name):
    thought, thought_text = THOUGHTS.get(name, ("", ""))
    answer, content = ANSWERS.get(name, ("It is **2**.", "It is **2**."))
    assert parse(name, thought + answer) == Reply(thought_text, content, [])
    if name in ONE_CALL:
        assert calls(parse(name, ONE_CALL[name])) == CALLED
    if name in TWO_CALLS:
        assert len(calls(parse(name, TWO_CALLS[name]))) == 2


@pytest.mark.parametrize("name", sorted(THOUGHTS))
def test_thought_that_the_prompt_opened_goes_on_in_the_reply(name):
    reply_format = load_built_in(name)
    opening, closing = reply_format.reasoning.open, reply_format.reasoning.close
    start = reply_format.source["start_anchor"]
    prompt = f"<s>{start if isinstance(start, str) else start[0]}{opening}\n"
    answer, content = ANSWERS.get(name, ("Hi.", "Hi."))
    text = f"so it is\n{closing}\n\n{answer}"
    part = reply_format.template.after_start(prompt)
    reply = check_every_cut(name, text, part)
    assert parts(reply) == ("so it is", content, []) == oracle(name, text, prompt)


def test_thought_that_the_prompt_closed_is_over():
    part = "<think>\n\n</think>\n\n"
    assert parse("hermes", "Hi.\n", part) == Reply("", "Hi.\n", [])
    parser = ReplyParser(load_built_in("hermes").template, part)
    assert parser.has_reasoned and not parser.is_reasoning


@pytest.mark.parametrize("name", sorted(set(ONE_CALL) & set(THOUGHTS) - {"harmony"}))
def test_call_ends_a_thought(name):
    opening = load_built_in(name).reasoning.open
    text = f"{opening}I call\n{ONE_CALL[name]}"
    assert parts(check_every_cut(name, text)) == ("I call", "", CALLED) == oracle(name, text)


# Content.


@pytest.mark.parametrize("text", ["", " \n", "  code\n    more \n\n", "Hello.\n", "\n\nx"])
def test_plain_reply_is_kept_as_it_is(text):
    assert parse("hermes", text) == Reply("", text, [])
    assert join_events(events("hermes", list(text))).content == text


def test_white_space_is_dropped_where_regions_touch():
    call = ONE_CALL["hermes"]
    reply = parse("hermes", f"<think>\n a\n b \n</think>\n\n One.\n{call}\n{call}\n\nTwo.\n")
    assert (reply.reasoning, reply.content) == ("a\n b", "One.\nTwo.\n")


@pytest.mark.parametrize(
    ("name", "opening", "closing"), [("hunyuan", "<answer>", "\n</answer>"), ("ernie", "<response>", "")]
)
def test_call_ends_an_answer_that_has_delimiters(name, opening, closing):
    text = f"<think>\nHm\n</think>\n{opening}\nLook.\n{ONE_CALL[name]}{closing}"
    assert parts(check_every_cut(name, text)) == ("Hm", "Look.", CALLED) == oracle(name, text)


def test_text_outside_of_harmonys_channels_is_content():
    thought, _ = THOUGHTS["harmony"]
    for text, content in (
        ("It is 2.", "It is 2."),
        (f"Hm. {thought}<|channel|>final<|message|>2", "Hm.\n2"),
        (
            "<|channel|>commentary to=browser.search <|message|>{}<|call|>",
            "<|channel|>commentary to=browser.search <|message|>{}<|call|>",
        ),
        ("<|channel|>fin", "<|channel|>fin"),
    ):
        reply = check_every_cut("harmony", text)
        assert reply.content == content and parts(reply) == oracle("harmony", text)


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('{"name": "weather", "arguments": {"city": "Paris", "days": 3}}', True),
        ('{"type": "function", "name": "weather", "parameters": {"city": "Paris", "days": 3}}', True),
        ('{"name": "Alice", "age": 5}', False),
        ('{"name": "weather"}', False),
    ],
)
def test_llamas_calls_are_objects_with_a_name_and_arguments(text, is_call):
    reply = check_every_cut("llama3", text)
    assert parts(reply) == oracle("llama3", text) == (("", "", CALLED) if is_call else ("", text, []))


def test_other_fields_are_content():
    template = ResponseTemplate.parse(
        {"start_anchor": "A:", "fields": {"answer": {"open": "<answer>", "close": "</answer>"}, "content": {}}}
    )
    parser = ReplyParser(template)
    assert join_events(parser.feed("<answer> 42 </answer>") + parser.finish()).content == "42"


# Streams.


def test_text_goes_out_as_soon_as_it_can_be_no_delimiter():
    parser = ReplyParser(load_built_in("hermes").template, tools=TOOLS)
    assert parser.feed("Hi <") == [Content("Hi")]
    assert parser.feed("tool_cal") == []
    assert parser.feed("endar>") == [Content(" <tool_calendar>")]
    assert parser.feed("\n") == []
    assert parser.finish() == [Content("\n")]


def test_thought_goes_out_as_it_comes():
    parser = ReplyParser(load_built_in("qwen_xml").template, "<think>\n", tools=TOOLS)
    assert parser.feed("Add the") == [Reasoning("Add the")]
    assert parser.feed(" ones.\n") == [Reasoning(" ones.")]
    assert parser.feed("</thi") == []
    assert parser.feed("nk>") == []
    assert parser.feed("\n\nIt is") == [Content("It is")]


def test_call_goes_out_as_a_whole():
    parser = ReplyParser(load_built_in("hermes").template, tools=TOOLS, make_id=lambda: "1")
    assert parser.feed('Look:\n<tool_call>\n{"name": "now", ') == [Content("Look:")]
    assert parser.feed('"arguments": {}}\n</tool_call') == []
    assert parser.feed(">") == [ToolCall("1", "now", "{}")]
    assert parser.feed("\n") == parser.finish() == []


# Positions of thoughts, for the count of their tokens.


@pytest.mark.parametrize("name", sorted(THOUGHTS))
@pytest.mark.parametrize("size", [1, 7, 5000])
def test_thoughts_are_found_where_they_stand(name, size):
    thought, _ = THOUGHTS[name]
    answer, _ = ANSWERS.get(name, ("It is **2**.", ""))
    text = ("" if name == "harmony" else "Well. ") + thought.replace("It < 5", "It < 5 " * 500) + answer
    for opened in ("", load_built_in(name).reasoning.open):
        whole = text.replace(opened, "", 1).removeprefix("Well. ") if opened else text
        parser = ReplyParser(load_built_in(name).template, opened)
        for begin in range(0, len(whole), size):
            parser.feed(whole[begin : begin + size])
        (span,) = parser.reasoning_spans
        assert whole[slice(*span)] == (thought.replace("It < 5", "It < 5 " * 500).rstrip().removeprefix(opened))


def test_thought_that_is_open_has_no_end():
    parser = ReplyParser(load_built_in("hermes").template)
    assert parser.reasoning_spans == []
    parser.feed("<think>Hm")
    assert parser.reasoning_spans == [(0, None)]
    parser.feed('<tool_call>{"name": "now"}</tool_call>')
    assert parser.reasoning_spans == [(0, None)]  # without tools it is no call
