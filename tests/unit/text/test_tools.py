"""Tools in requests: their bounds, what templates are told of them, and grammars that force a call."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from labinfer.base.errors import UserError
from labinfer.base.json_depth import MAX_DEPTH
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.requests.input_processor import InputProcessor
from labinfer.requests.jsonl import ParsedLine, parse_line
from labinfer.requests.prompts import ChatPrompt, parse_prompt
from labinfer.requests.protocol import CHAT_URL, COMPLETIONS_URL
from labinfer.text.reply_format import load_built_in
from labinfer.text.reply_grammar import forced_calls
from labinfer.text.tools import MAX_FORCED_CALLS, MAX_TOOLS, ToolUse
from labinfer.weights.resolve import resolve_model

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "hi"}]


def tool(name: str = "weather", **function) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def parse(url: str = CHAT_URL, **body) -> ParsedLine:
    body = ({"messages": MESSAGES} if url == CHAT_URL else {"prompt": "hi"}) | body
    line = {"custom_id": "c", "method": "POST", "url": url, "body": body}
    return parse_line(json.dumps(line).encode(), SamplingParams())


# Fields.


def test_tools_stand_beside_the_messages():
    tools = [tool(description="How is it?", parameters=CITY, strict=True), tool("now")]
    fields = {"tools": tools, "tool_choice": named("now"), "parallel_tool_calls": False}
    assert parse(**fields).prompt == ChatPrompt(MESSAGES, ToolUse.from_fields(fields))


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tools": [], "tool_choice": "none"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}]
    + [{"tools": [tool()], "tool_choice": "none"}],
)
def test_where_no_tool_is_offered_there_are_only_messages(fields):
    assert parse(**fields).prompt == ChatPrompt(MESSAGES)


@pytest.mark.parametrize("name", ["a", "A-b_9", "x" * 64])
def test_names_in_bounds_are_accepted(name):
    assert msgspec.to_builtins(parse(tools=[tool(name)]).prompt.tool_use.tools) == [tool(name)]


@pytest.mark.parametrize("name", ["", "a b", "é", "a.b", "x" * 129, "a\n", None, 5])
def test_names_out_of_bounds_are_refused(name):
    with pytest.raises(UserError, match=r"tools\[0\].function.name"):
        parse(tools=[tool(name)])


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": "required"}, "'required' needs tools"),
        ({"tool_choice": "required", "tools": []}, "'required' needs tools"),
        ({"tool_choice": named("weather")}, "'weather' needs tools"),
        ({"tools": [tool()], "tool_choice": named("wether")}, "'wether' is not in tools: weather"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "custom", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [tool(), tool("now"), tool()]}, "2 functions called 'weather'"),
        ({"tools": [tool(f"f{index}") for index in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "type"),
        ({"tools": [{"type": "function"}]}, "function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "retrieval"),
        ({"tools": [tool(returns={})]}, "returns"),
        ({"tools": [tool(description=5)]}, "description"),
        ({"tools": [tool(parameters="x")]}, "parameters"),
        (
            {"tools": [tool(parameters={"type": "string"})]},
            "parameters of 'weather' must be .*\"object\", not 'string'",
        ),
        (
            {"tools": [tool(parameters={"type": "object", "required": 5})]},
            "required in the parameters of 'weather' must be a list",
        ),
        ({"tools": [tool(parameters=nested(MAX_DEPTH + 1))]}, "more than 64 levels deep"),
        ({"tools": [tool(parameters=nested(400))]}, "deep"),
        ({"functions": [{"nam": "f"}]}, "functions"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields, says):
    with pytest.raises(UserError, match=says):
        parse(**fields)


def test_bounds_are_inside():
    tools = [tool(f"f{index}") for index in range(MAX_TOOLS - 1)] + [tool(parameters=nested(MAX_DEPTH))]
    assert msgspec.to_builtins(parse(tools=tools).prompt.tool_use.tools) == tools


@pytest.mark.parametrize("fields", [{"tools": [tool()]}, {"tool_choice": "required"}, {"parallel_tool_calls": True}])
def test_completions_have_no_tools(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        parse(COMPLETIONS_URL, **fields)


# Messages.


def past_call(arguments, **other) -> dict:
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}} | other


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("", {}),
        (" \n", {}),
        ("{}", {}),
        ('{"city": ', '{"city": '),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_templates_get_arguments_as_an_object(arguments, read):
    asked = {"role": "assistant", "content": None, "tool_calls": [past_call(arguments, index=0)]}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20 C"}]}
    assert parse(messages=[asked, answer]).prompt.messages == [
        {"role": "assistant", "content": None, "tool_calls": [past_call(read)]},
        {"role": "tool", "content": "20 C", "tool_call_id": "call_1"},
    ]


def test_content_beside_calls_is_kept():
    message = {"role": "assistant", "content": "Look:", "tool_calls": [past_call({})]}
    assert parse(messages=[message]).prompt.messages == [message]
    assert parse(messages=[message | {"tool_calls": []}]).prompt.messages == [{"role": "assistant", "content": "Look:"}]


@pytest.mark.parametrize(
    "call", [{}, {"function": {"name": "f"}}, {"function": {"name": "f", "arguments": 5}}, past_call("", type="x")]
)
def test_broken_calls_in_messages_are_refused(call):
    with pytest.raises(UserError, match=r"messages\[0\].tool_calls\[0\]"):
        parse(messages=[{"role": "assistant", "tool_calls": [call]}])


# From prompt to tokens.


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve_model("demo", "", may_download=False)


@pytest.fixture(scope="module")
def reader(demo) -> InputProcessor:
    return InputProcessor(demo, required=True)


def test_model_is_told_of_the_tools(reader):
    tools = [tool(description="How is it?", parameters=CITY, strict=True)]
    request = reader.process("key", parse_prompt({"messages": MESSAGES, "tools": tools})[0], SamplingParams())
    text = reader.tokenizer.decode(request.prompt_token_ids)
    assert json.dumps(tool(description="How is it?", parameters=CITY)) in text
    assert "strict" not in text


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt": "hi", "tools": [tool()]}, "tools need messages, not prompt"),
        ({"messages": MESSAGES, "tools": [tool("a b")]}, r"tools\[0\].function.name"),
        ({"messages": MESSAGES, "tools": "weather"}, "tools"),
        ({"messages": MESSAGES, "tools": [tool()], "tool_choice": named("now")}, "is not in tools"),
        ({"messages": MESSAGES, "tool": [tool()]}, "no key 'tool'"),
    ],
)
def test_prompts_of_python_callers_are_checked_too(reader, prompt, says):
    with pytest.raises(UserError, match=says):
        reader.process("key", parse_prompt(prompt)[0], SamplingParams())


# Grammars.


@pytest.fixture(scope="module")
def with_tags(demo, tmp_path_factory) -> Path:
    """The demo's tokenizer with the tags as tokens, as Qwen2.5's vocabulary has them."""
    directory = tmp_path_factory.mktemp("with_tags")
    vocabulary = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    like = vocabulary["added_tokens"][0]
    for index, tag in enumerate(("<tool_call>", "</tool_call>")):
        added = {"id": len(vocabulary["model"]["vocab"]) + index, "content": tag, "special": False}
        vocabulary["added_tokens"].append(like | added)
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (directory / "tokenizer_config.json").write_bytes((demo / "tokenizer_config.json").read_bytes())
    return directory


@pytest.fixture(params=["demo", "with_tags"], scope="module")
def matches(request):
    """A function that says whether a grammar takes a whole text."""
    reader = InputProcessor(request.getfixturevalue(request.param), required=True)
    tokens = LLTokenizer(str(request.getfixturevalue(request.param) / "tokenizer.json"))
    assert ("<tool_call>" in reader.tokenizer.added_tokens) == (request.param == "with_tags")

    def match(use: ToolUse, text: str) -> bool:
        grammar = forced_calls(use, load_built_in("hermes").call, reader.tokenizer.added_tokens)
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = reader.tokenizer.encode(text, add_special_tokens=False)
        assert reader.tokenizer.decode(ids) == text
        return all(map(matcher.consume_token, ids)) and matcher.is_accepting()

    return match


def use(**fields) -> ToolUse:
    return ToolUse.from_fields({"tools": [tool(parameters=CITY), tool("now")], "tool_choice": "required"} | fields)


def call(arguments: str = '{"city": "Paris"}', name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_where_no_call_is_demanded_nothing_is_forced(choice):
    assert not use(tool_choice=choice).is_forced


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (call(), True),
        (call('{"city": "日本", "days": 3}'), True),
        (call("{}", "now"), True),
        (call() + "\n" + call("{}", "now"), True),
        ("\n".join([call()] * MAX_FORCED_CALLS), True),
        ("\n".join([call()] * (MAX_FORCED_CALLS + 1)), False),
        ("", False),
        ("Hi.\n" + call(), False),
        (call() + "\n", False),
        (call("{}"), False),
        (call('{"city": 5}'), False),
        (call('{"city": "Paris", "when": 1}'), False),
        (call('{"city":"Paris"}'), False),
        (call(name="now"), False),
        (call("{}", "wether"), False),
    ],
)
def test_required_call_keeps_to_the_schemas(matches, text, taken):
    assert matches(use(), text) == taken


@pytest.mark.parametrize(
    "fields", [{"parallel_tool_calls": False}, {"tool_choice": named("weather")}], ids=["not parallel", "named"]
)
def test_one_call_is_one_call(matches, fields):
    assert matches(use(**fields), call())
    assert not matches(use(**fields), call() + "\n" + call())
    assert matches(use(**fields), call("{}", "now")) == ("tool_choice" not in fields)


@pytest.mark.parametrize(
    ("parameters", "arguments", "taken"),
    [
        (None, "{}", True),
        (None, '{"a": 1}', False),
        ({}, '{"a": [1, null]}', True),
        ({}, "[]", False),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', True),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["x"]}}}, '{"a": "x"}', True),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["x"]}}}, '{"a": "y"}', False),
        ({"properties": {"a": {"type": "string", "format": "unheard-of"}}}, '{"a": "x"}', True),
        ({"x-guidance": {"item_separator": "x"}}, '{"a": 1, "b": 2}', True),
    ],
)
def test_schemas_of_many_kinds_are_followed(matches, parameters, arguments, taken):
    function = {} if parameters is None else {"parameters": parameters}
    assert matches(use(tools=[tool(**function)]), call(arguments)) == taken


@pytest.mark.parametrize("name", ["demo", "with_tags"])
@pytest.mark.parametrize("choice", ["auto", "required", named("weather")], ids=["auto", "required", "named"])
def test_request_takes_the_grammar_with_it(name, choice, request):
    reader = InputProcessor(request.getfixturevalue(name), required=True)
    fields = {"tools": [tool(parameters=CITY)], "tool_choice": choice}
    form = reader.process(
        "key", parse_prompt({"messages": MESSAGES} | fields)[0], SamplingParams()
    ).sampling.structured_outputs
    if choice == "auto":
        assert form is None
        return
    grammar = forced_calls(ToolUse.from_fields(fields), load_built_in("hermes").call, reader.tokenizer.added_tokens)
    assert form == StructuredOutputs(grammar=grammar)
    assert ("<[" in grammar) == (name == "with_tags")


def test_demanded_call_and_another_form_do_not_go_together(reader):
    prompt = {"messages": MESSAGES, "tools": [tool()], "tool_choice": "required"}
    sampling = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    with pytest.raises(UserError, match="tool_choice"):
        reader.process("key", parse_prompt(prompt)[0], sampling)
    assert reader.process("key", parse_prompt(prompt | {"tool_choice": "auto"})[0], sampling).sampling == sampling


def test_strict_schema_is_kept_to_or_refused(demo):
    parameters = {"properties": {"a": {"type": "string", "format": "unheard-of"}}}
    strict = use(tools=[tool(parameters=parameters, strict=True)])
    with pytest.raises(
        UserError, match=r"tools: parameters of 'weather': strict .* cannot enforce format 'unheard-of' \(at a\)"
    ):
        forced_calls(strict, load_built_in("hermes").call, {})
    (left_out,) = use(tools=[tool(parameters=parameters)]).check_schemas()
    assert left_out.startswith("tools: parameters of 'weather': a grammar cannot enforce format 'unheard-of' (at a)")
    assert use(tools=[tool(parameters=parameters)], tool_choice="auto").check_schemas() == []
