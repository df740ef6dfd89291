"""Messages of chat requests, and the fields that concern a conversation."""

from __future__ import annotations

import pytest
from request_lines import batch, chat, parse

from labinfer.base.errors import UserError
from labinfer.requests.prompts import ChatPrompt, TemplateUse, parse_prompt
from labinfer.requests.protocol import CHAT_URL, NEUTRAL_VALUES


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert parse(chat(parts)).prompt.messages[0]["content"] == "one two"


def test_content_part_may_have_a_cache_hint():
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]
    assert parse(chat(parts)).prompt.messages[0]["content"] == "one"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image_url", "text": "x"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {"file_id": "f"}},
    ],
)
def test_what_is_no_text_is_refused_in_plain_words(part):
    with pytest.raises(UserError, match=f"content parts of type '{part['type']}' are not supported: .*messages"):
        parse(chat([{"type": "text", "text": "look"}, part]))


@pytest.mark.parametrize("part", [{"text": "x"}, {"type": "refusal", "refusal": "x"}, {"type": "text"}, "x"])
def test_parts_of_no_known_kind_are_refused(part):
    with pytest.raises(UserError, match="messages"):
        parse(chat([part]))


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["simple", "batch"])
def test_roles_of_openai(role, wrapped):
    body = {"messages": [{"role": role, "content": "hi"}]}
    assert parse(batch(body, CHAT_URL) if wrapped else body).prompt == parse_prompt(body)[0]


@pytest.mark.parametrize("wrapped", [False, True], ids=["simple", "batch"])
def test_templates_know_the_developer_as_the_system(wrapped):
    body = {"messages": [{"role": "developer", "content": "Be short."}]}
    parsed = parse(batch(body, CHAT_URL) if wrapped else body)
    assert parsed.prompt == parse_prompt({"messages": [{"role": "system", "content": "Be short."}]})[0]


@pytest.mark.parametrize("role", ["User", "critic", "human", "", None, 5])
@pytest.mark.parametrize("wrapped", [False, True], ids=["simple", "batch"])
def test_other_roles_are_refused(role, wrapped):
    body = {"messages": [{"role": role, "content": "hi"}]}
    with pytest.raises(UserError, match="role"):
        parse(batch(body, CHAT_URL) if wrapped else body)


@pytest.mark.parametrize(
    "body",
    [
        *({name: None} for name in NEUTRAL_VALUES),
        *({name: value} for name, values in NEUTRAL_VALUES.items() for value in values),
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "tool_choice": "none"},
        {"stream_options": None},
        {"response_format": None},
        {"parallel_tool_calls": None},
        {"reasoning_effort": None, "chat_template_kwargs": {}},
        {"stop": []},
        {"functions": [], "function_call": "auto"},
        {"verbosity": "high"},
        {"prediction": {"type": "content", "content": "x"}},
        {"skip_special_tokens": True, "spaces_between_special_tokens": False},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"prompt_cache_retention": "24h", "service_tier": "flex", "store": True, "safety_identifier": "x"},
    ],
    ids=str,
)
def test_chat_values_that_change_nothing_are_accepted(body):
    parsed = parse(chat("hi", **body))
    assert parsed.prompt.messages == [{"role": "user", "content": "hi"}] and not parsed.prompt.tool_use.offered
    assert parsed.prompt.template_use.ending == "before answer"


@pytest.mark.parametrize(
    "body",
    [
        {"modalities": ["text", "audio"]},
        {"modalities": "text"},
        {"web_search_options": {}},
        {"audio": {"voice": "x"}},
        {"chat_template": "{{ messages }}"},
        {"documents": [{"text": "x"}]},
        {"use_beam_search": True},
        {"use_beam_search": 0},
        {"truncate_prompt_tokens": 5},
        {"return_token_ids": True},
    ],
    ids=str,
)
def test_chat_values_that_would_change_something_are_refused_by_name(body):
    with pytest.raises(UserError, match=f"^{next(iter(body))}=.* not supported"):
        parse(chat("hi", **body))


def test_beam_search_by_its_other_name_leads_to_num_beams():
    with pytest.raises(UserError, match="^use_beam_search=True is not supported; use num_beams$"):
        parse(chat("hi", use_beam_search=True))


def test_older_functions_are_tools():
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    older = chat("hi", functions=[function], function_call={"name": "f"})
    named = {"type": "function", "function": {"name": "f"}}
    newer = chat("hi", tools=[{"type": "function", "function": function}], tool_choice=named)
    older, newer = parse(older).prompt.tool_use, parse(newer).prompt.tool_use
    assert older.offered == newer.offered and older.forced_functions == newer.forced_functions
    assert older.has_functions and not newer.has_functions and not older.is_parallel
    assert parse(chat("hi", functions=[function], function_call="none")).prompt.tool_use.offered == []


def test_older_calls_and_results_are_those_of_tools():
    call, result = {"name": "f", "arguments": "{}"}, {"role": "function", "name": "f", "content": "5"}
    messages = [{"role": "assistant", "content": None, "function_call": call}, result]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    expected = [{"role": "assistant", "content": None, "tool_calls": calls}, result | {"role": "tool"}]
    assert parse(batch({"messages": messages}, CHAT_URL)).prompt.messages == expected


def test_allowed_tools_are_those_that_are_there():
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    allowed = {"tools": [{"type": "function", "function": {"name": name}} for name in "ca"]}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": allowed | {"mode": mode}}
        use = parse(chat("hi", tools=tools, tool_choice=choice)).prompt.tool_use
        assert [tool["function"]["name"] for tool in use.offered] == ["a", "c"]
        assert use.is_forced == (mode == "required")
    with pytest.raises(UserError, match="tool_choice 'a' is not in tools: b"):
        parse(chat("hi", tools=tools[1:2], tool_choice=choice))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions and"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "is not in tools"),
        ({"function_call": {"name": "g"}}, "needs tools"),
        ({"functions": [{"nam": "f"}]}, "functions"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message continues"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}}, "tool_choice"),
    ],
    ids=lambda body: str(body)[:40],
)
def test_chat_fields_that_do_not_go_together_are_refused(body, says):
    with pytest.raises(UserError, match=says):
        parse(chat("hi", **body))


@pytest.mark.parametrize(
    ("body", "ending"),
    [
        ({"continue_final_message": True}, "in message"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "in message"),
        ({"add_generation_prompt": False}, "behind message"),
    ],
)
def test_end_of_a_conversation_is_chosen(body, ending):
    assert parse(chat("hi", **body)).prompt.template_use.ending == ending


@pytest.mark.parametrize("wrapped", [True, False])
def test_chat_template_gets_its_variables(wrapped):
    fields = {
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False, "budget": 5, "style": "terse"},
    }
    line = chat("hi", **fields) if wrapped else {"messages": [{"role": "user", "content": "hi"}]} | fields
    assert parse(line).prompt == ChatPrompt([{"role": "user", "content": "hi"}], template_use=TemplateUse(**fields))
    assert parse_prompt({"messages": [{"role": "user", "content": "hi"}]} | fields)[0] == parse(line).prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "huge"},
        {"reasoning_effort": 5},
        {"chat_template_kwargs": {"a b": 1}},
        {"chat_template_kwargs": {"x" * 65: 1}},
        {"chat_template_kwargs": {"a\n": 1}},
        {"chat_template_kwargs": {"a": [1]}},
        {"chat_template_kwargs": {"a": {"b": 1}}},
        {"chat_template_kwargs": {"a": "x" * 1025}},
        {"chat_template_kwargs": {f"a{index}": 1 for index in range(17)}},
        {"chat_template_kwargs": [1]},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_variables_of_a_chat_template_are_bounded(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        parse(chat("hi", **fields))
    with pytest.raises(UserError, match=next(iter(fields))):
        parse_prompt({"messages": [{"role": "user", "content": "hi"}]} | fields)


@pytest.mark.parametrize("fields", [{"reasoning_effort": "low"}, {"chat_template_kwargs": {"a": 1}}])
def test_variables_of_a_chat_template_need_a_conversation(fields):
    for prompt in ({"prompt": "hi"}, {"prompt_token_ids": [5]}):
        with pytest.raises(UserError, match=f"{next(iter(fields))} needs messages"):
            parse(prompt | fields)
        with pytest.raises(UserError, match=f"{next(iter(fields))} needs messages"):
            parse_prompt(prompt | fields)


def test_past_reasoning_are_told_to_the_chat_template():
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "42", name: "Add them."}
        line = {"messages": [message]}
        assert parse(line).prompt.messages == [{"role": "assistant", "content": "42", "reasoning_content": "Add them."}]


def test_content_may_be_null():
    assert parse(chat(None)).prompt.messages[0]["content"] == ""
