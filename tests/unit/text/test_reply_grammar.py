"""Grammars of replies: what stands before a form, and forced calls that are read back, in every format."""

from __future__ import annotations

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer
from reply_samples import ONE_CALL, THOUGHTS, TOOLS, TWO_CALLS
from reply_tokenizer import CHAT, write_tokenizer

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.engine.guide import allows
from labinfer.requests.input_processor import InputProcessor
from labinfer.requests.prompts import parse_prompt
from labinfer.text.argument_schema import ArgumentSchema
from labinfer.text.guidance import GrammarGuideMaker, grammar_source
from labinfer.text.reply_format import load_built_in
from labinfer.text.reply_grammar import before_form, forced_calls
from labinfer.text.reply_parts import join_events
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tools import ToolUse
from labinfer.weights.resolve import resolve_model

REFUSED = object()


@pytest.fixture(scope="module")
def with_marks(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("marks"), "<tool_call></think>" + CHAT))


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer(resolve_model("demo", "", may_download=False))


@pytest.fixture(params=["with_marks", "plain"], scope="module")
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


@cache
def guidance_tokenizer(path: str) -> LLTokenizer:
    return LLTokenizer(path)


def takes(tokenizer: Tokenizer, source: str, text: str) -> bool:
    """Whether a grammar takes a whole text."""
    matcher = LLMatcher(guidance_tokenizer(str(tokenizer.json_file)), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(map(matcher.consume_token, tokenizer.encode(text, add_special_tokens=False))) and matcher.is_accepting()


def use(**fields) -> ToolUse:
    return ToolUse.from_fields({"tools": TOOLS, "tool_choice": "required"} | fields)


# Forced calls.


@pytest.mark.parametrize("name", sorted(set(ONE_CALL) - {"gemma4"}))  # whose arguments are not JSON
def test_forced_call_is_one_as_models_write_it(tokenizer, name):
    form = load_built_in(name).call
    grammar = LLMatcher.grammar_from_lark(forced_calls(use(), form, tokenizer.added_tokens))
    text = ONE_CALL[name].removesuffix("<|call|>")  # the token that ends the answer
    assert takes(tokenizer, grammar, text)
    assert not takes(tokenizer, grammar, "Hm. " + text) and not takes(tokenizer, grammar, "")
    assert not takes(tokenizer, grammar, text.replace("weather", "wether"))
    named = use(tool_choice={"type": "function", "function": {"name": "now"}})
    assert not takes(tokenizer, LLMatcher.grammar_from_lark(forced_calls(named, form, tokenizer.added_tokens)), text)


@pytest.mark.parametrize("name", sorted(set(TWO_CALLS) - {"harmony", "gemma4"}))
def test_several_calls_are_forced_where_they_may_be(tokenizer, name):
    form, text = load_built_in(name).call, TWO_CALLS[name]
    assert takes(tokenizer, LLMatcher.grammar_from_lark(forced_calls(use(), form, tokenizer.added_tokens)), text)
    single = forced_calls(use(parallel_tool_calls=False), form, tokenizer.added_tokens)
    assert not takes(tokenizer, LLMatcher.grammar_from_lark(single), text)


INTEGER_X = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
DEFINITIONS = {"A": INTEGER_X, "Color": {"enum": ["red", "green"], "type": "string"}, "Int": {"type": "integer"}}
DEFINITIONS |= {"Loop": {"$ref": "#/$defs/Loop"}}
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minimax", "deepseek_v32"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, 'any "text"\nof <lines>', 'any "text"\nof <lines>'),
        ({"type": "string"}, "北京 🦊", "北京 🦊"),
        ({"type": "string", "maxLength": 4, "minLength": 2}, "北京", "北京"),
        ({"type": "string", "maxLength": 4, "minLength": 2}, "Paris", REFUSED),
        ({"type": "string", "maxLength": 4, "minLength": 2}, "P", REFUSED),
        ({"type": "string"}, "a <b> 1/2 (d)", "a <b> 1/2 (d)"),
        ({"type": "string"}, "{TAG} b", REFUSED),
        ({"type": "string"}, "a\n{END}\nb", REFUSED),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", REFUSED),
        ({"enum": ["red", "green"]}, "green", "green"),
        ({"enum": ["red", "green"]}, "blue", REFUSED),
        ({"enum": ["red", "green"]}, '"green"', REFUSED),
        ({"enum": [1, 2.5, None, "x"]}, "1", 1),
        ({"enum": [1, 2.5, None, "x"]}, "null", None),
        ({"enum": [1, 2.5, None, "x"]}, "x", "x"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"const": "so"}, "so", "so"),
        ({"const": "so"}, '"so"', REFUSED),
        ({"const": 7}, "7", 7),
        (OPTIONAL_TEXT, "Paris", "Paris"),
        (OPTIONAL_TEXT, "null", None),
        ({"type": ["string", "null"]}, "Paris", "Paris"),
        ({"type": "string", "nullable": True}, "Paris", "Paris"),
        ({"oneOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "red", "red"),
        ({"oneOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, "blue", REFUSED),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "five", REFUSED),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, "green", "green"),
        ({"allOf": [{"$ref": "#/$defs/Int"}], "description": "how many"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Int"}], "description": "how many"}, "five", REFUSED),
        ({"$ref": "#/$defs/A"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/A"}, '{"y": 1}', REFUSED),
        ({"type": "array", "items": {"$ref": "#/$defs/A"}}, '[{"x": 1}]', [{"x": 1}]),
        ({"properties": {"x": {"type": "integer"}}, "required": ["x"]}, '{"x": 1}', {"x": 1}),
        ({}, "anything", "anything"),
        ({"description": "no type"}, "anything", "anything"),
        ({"$ref": "#/$defs/Loop"}, "anything", "anything"),
        ({"$ref": "#/$defs/Nowhere"}, "anything", "anything"),
        (True, "anything", "anything"),
    ],
)
def test_arguments_in_tags_keep_to_the_schema_and_come_back(tokenizer, name, schema, text, value):
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": DEFINITIONS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    form = load_built_in(name).call
    text = text.replace("{TAG}", form.argument.partition("{value}")[0].strip().replace("{key}", "b"))
    text = text.replace("{END}", form.text.partition("{arguments}")[2].strip())
    is_string = "true" if isinstance(value, str) or text == "null" and "string" in str(schema) else "false"
    argument = form.argument.replace("{key}", "a").replace("{value}", text).replace("{string}", is_string)
    whole = form.begin + form.text.replace("{name}", "f").replace("{arguments}", argument) + form.end
    grammar = LLMatcher.grammar_from_lark(forced_calls(use(tools=tools), form, tokenizer.added_tokens))
    assert takes(tokenizer, grammar, whole) == (value is not REFUSED)
    if value is not REFUSED:
        parser = load_built_in(name).parser("", tools, True)
        (call,) = join_events(parser.feed(whole) + parser.finish()).calls
        assert json.loads(call.arguments) == {"a": value}


def test_references_without_end_are_no_types():
    chain = {f"A{number}": {"$ref": f"#/$defs/A{number + 1}"} for number in range(3000)}
    parameters = {"properties": {"a": {"$ref": "#/$defs/A0"}}, "$ref": "#/$defs/A0", "$defs": chain}
    schema = ArgumentSchema(parameters)
    assert schema.cast({"a": "5"}) == {"a": "5"} and schema.texts("a").takes_any


def test_parameters_may_stand_behind_a_reference(tokenizer):
    definitions = {"Args": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    parameters = {"allOf": [{"$ref": "#/definitions/Args"}], "definitions": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = forced_calls(use(tools=tools), load_built_in("qwen_xml").call, tokenizer.added_tokens)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    grammar = LLMatcher.grammar_from_lark(grammar)
    assert takes(tokenizer, grammar, text.format(5)) and not takes(tokenizer, grammar, text.format("five"))
    parser = load_built_in("qwen_xml").parser("", tools, True)
    (call,) = join_events(parser.feed(text.format(5)) + parser.finish()).calls
    assert json.loads(call.arguments) == {"a": 5}


# What stands before a form.

SCHEMA = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FORMS = [
    (SCHEMA, '{"a": 1}'),
    (StructuredOutputs(regex="(yes|no){2}"), "yesno"),
    (StructuredOutputs(choice=["red", "green"]), "red"),
    (StructuredOutputs(grammar='start: "x" inner\ninner: "y"+'), "xyy"),
]


@pytest.mark.parametrize(("form", "text"), FORMS)
@pytest.mark.parametrize("name", sorted(THOUGHTS))
def test_form_begins_behind_the_thought(tokenizer, name, form, text):
    reply_format = load_built_in(name)
    opening, closing, answer = reply_format.reasoning.open, reply_format.reasoning.close, reply_format.answer

    def source(prompt: str, may_think: bool = True) -> str:
        parser = reply_format.parser(prompt, [], True)
        return grammar_source(form, before_form(reply_format, parser, may_think, tokenizer.added_tokens))

    start = reply_format.source["start_anchor"]
    start = start if isinstance(start, str) else start[0]
    thought = f"{opening}hm < so {{\n{closing}\n\n"
    assert takes(tokenizer, source(start), answer + text)
    assert takes(tokenizer, source(start), thought + answer + text)
    assert not takes(tokenizer, source(start), f"{opening}hm") and not takes(tokenizer, source(start), thought + "hm")
    assert not takes(tokenizer, source(start, may_think=False), thought + answer + text)
    opened = source(f"{start}{opening}\n")
    assert takes(tokenizer, opened, f"hm\n{closing}{answer}{text}")
    assert not takes(tokenizer, opened, answer + text)
    if name == "harmony":
        return  # whose next part begins with the start anchor anew
    assert not takes(tokenizer, source(start + closing), thought + answer + text)  # DeepSeek's way to have no thought
    closed = source(f"{start}{opening}\n\n{closing}\n\n")
    assert takes(tokenizer, closed, answer + text) and not takes(tokenizer, closed, thought + answer + text)


def test_thought_whose_end_nobody_knows_is_refused():
    from labinfer.text.reply_format import choose_format

    fields = {"thinking": {"open": "<t>", "close_pattern": "</t\\d>"}, "content": {}}
    reply_format = choose_format("", {"start_anchor": "A:", "fields": fields}, "")
    with pytest.raises(UserError, match="no fixed text that closes it"):
        before_form(reply_format, reply_format.parser("A:<t>", [], True), True, {})


@pytest.mark.parametrize(("variables", "thinks"), [({"thinking": True}, True), ({}, False)])
def test_request_knows_what_comes_before_its_form(tmp_path, variables, thinks):
    directory = write_tokenizer(tmp_path, "</think><tool_call>" + CHAT)
    reader = InputProcessor(directory, required=True)
    messages = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": variables}
    request = reader.process(0, parse_prompt(messages)[0], SamplingParams(structured_outputs=SCHEMA))
    assert request.is_chat and request.before_form.startswith("before: /" if thinks else "before: (")
    assert reader.process(0, parse_prompt(messages)[0], SamplingParams()).before_form == ""
    guide = GrammarGuideMaker(lambda: reader.tokenizer, 3200, (0,)).make(SCHEMA, request.before_form)
    hm, brace = (reader.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("hm", "{"))
    assert allows(guide.mask, hm) == thinks
    assert allows(guide.mask, brace)
    forced = messages | {"tools": TOOLS, "tool_choice": "required"}
    request = reader.process(0, parse_prompt(forced)[0], SamplingParams())
    assert request.before_form and request.sampling.structured_outputs.grammar.startswith("start: call")
    reader.close()


def test_call_cannot_be_forced_where_its_form_is_unknown(tmp_path):
    directory = write_tokenizer(tmp_path, CHAT)
    reader = InputProcessor(directory, required=True)
    messages = [{"role": "user", "content": "hi"}]
    prompt = parse_prompt({"messages": messages, "tools": TOOLS, "tool_choice": "required"})[0]
    with pytest.raises(UserError, match="the format of this model's tool calls is unknown"):
        reader.process(0, prompt, SamplingParams())
    request = InputProcessor(directory, True, "glm").process(0, prompt, SamplingParams())
    assert "weather" in request.sampling.structured_outputs.grammar


def test_marks_are_shown_in_replies_only(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, "<|channel|><|message|>" + CHAT))
    ids = tokenizer.encode("<|channel|>final<|message|>Hi<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "finalHi"
    assert tokenizer.reply_decoder().decode(ids) == "<|channel|>final<|message|>Hi"
    parser = tokenizer.reply_parser(tokenizer.encode("<|start|>assistant"), [])
    assert join_events(parser.feed(tokenizer.reply_decoder().decode(ids)) + parser.finish()).content == "Hi"
