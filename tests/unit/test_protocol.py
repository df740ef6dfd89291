"""The request schema: what lines say, what is refused, and that every refusal is one clear error."""

from __future__ import annotations

import json

import pytest

from labinfer.errors import UserError
from labinfer.jsonl import parse_line
from labinfer.prompts import ChatPrompt, TemplateUse, TextPrompt, TokensPrompt, parse_prompt
from labinfer.protocol import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL, NEUTRAL_VALUES
from labinfer.sampling_params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5, stop=("END",), seed=3)


def parse(line, defaults=DEFAULTS):
    return parse_line(line if isinstance(line, bytes) else json.dumps(line).encode(), defaults)


def batch(body, url=COMPLETIONS_URL, **other):
    return {"custom_id": "c-1", "method": "POST", "url": url, "body": body} | other


def chat(content, **body):
    return batch({"messages": [{"role": "user", "content": content}]} | body, CHAT_URL)


# Simple lines.


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"prompt": "hi"}, {"prompt": "hi"}),
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2]}),
        (
            {"messages": [{"role": "user", "content": "hi", "name": "Ann"}]},
            {"messages": [{"role": "user", "content": "hi", "name": "Ann"}]},
        ),
        ({"prompt": "你好"}, {"prompt": "你好"}),
    ],
)
def test_simple_line_carries_its_prompt(line, prompt):
    parsed = parse(line)
    assert parsed.prompt == parse_prompt(prompt)[0]
    assert parsed.sampling == DEFAULTS
    assert (parsed.id, parsed.custom_id, parsed.is_batch) == (None, None, False)


@pytest.mark.parametrize("line", [{}, {"cache_salt": "a"}, {"prompt": "hi", "prompt_token_ids": [1]}])
def test_simple_line_has_one_prompt(line):
    with pytest.raises(UserError, match="a prompt needs exactly one of prompt, prompt_token_ids and messages"):
        parse(line)


@pytest.mark.parametrize("own_id", [5, "five", 0, ""])
def test_simple_line_may_have_an_id(own_id):
    assert parse({"prompt": "hi", "id": own_id}).id == own_id


def test_fields_of_the_line_go_before_the_defaults():
    parsed = parse({"prompt": "hi", "max_tokens": 1, "temperature": 0, "stop": "x", "seed": None})
    assert parsed.sampling == SamplingParams(max_tokens=1, temperature=0, stop=("x",), seed=3)


@pytest.mark.parametrize(("stop", "expected"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (None, ("END",))])
def test_stop_is_a_string_or_a_list(stop, expected):
    assert parse({"prompt": "hi", "stop": stop}).sampling.stop == expected


@pytest.mark.parametrize("field", ["max_token", "best", "stream", "model", "prompts"])
def test_unknown_fields_of_a_simple_line_are_refused_by_name(field):
    with pytest.raises(UserError, match=f"`{field}`"):
        parse({"prompt": "hi", field: 1})


# Batch lines.


def test_completion_line_is_read():
    parsed = parse(batch({"model": "m", "prompt": "hi", "max_tokens": 2, "user": "u"}))
    assert (parsed.prompt, parsed.custom_id, parsed.url) == (TextPrompt("hi"), "c-1", COMPLETIONS_URL)
    assert parsed.model == "m" and parsed.is_batch and parsed.sampling.max_tokens == 2


def test_completion_line_may_carry_token_ids():
    assert parse(batch({"prompt": [3, 4]})).prompt == TokensPrompt([3, 4])


def test_chat_line_is_read():
    parsed = parse(chat("hi", max_completion_tokens=9))
    assert parsed.prompt == parse_prompt({"messages": [{"role": "user", "content": "hi"}]})[0]
    assert parsed.url == CHAT_URL and parsed.sampling.max_tokens == 9


def test_max_completion_tokens_goes_before_max_tokens():
    assert parse(chat("hi", max_tokens=4, max_completion_tokens=9)).sampling.max_tokens == 9
    assert parse(chat("hi", max_tokens=9, max_completion_tokens=4)).sampling.max_tokens == 4


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
    with pytest.raises(UserError, match=f"this model reads text only, .* '{part['type']}'.*messages"):
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
        {"include_reasoning": False},
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
    with pytest.raises(UserError, match="tool_choice 'a' is not among tools, which are b"):
        parse(chat("hi", tools=tools[1:2], tool_choice=choice))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions and"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "not among tools"),
        ({"function_call": {"name": "g"}}, "needs tools"),
        ({"functions": [{"nam": "f"}]}, "functions"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message goes on"),
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
        with pytest.raises(UserError, match=f"{next(iter(fields))} goes with messages"):
            parse(prompt | fields)
        with pytest.raises(UserError, match=f"{next(iter(fields))} goes with messages"):
            parse_prompt(prompt | fields)


def test_past_thoughts_are_told_to_the_chat_template():
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "42", name: "Add them."}
        line = {"messages": [message]}
        assert parse(line).prompt.messages == [{"role": "assistant", "content": "42", "reasoning_content": "Add them."}]


def test_content_may_be_null():
    assert parse(chat(None)).prompt.messages[0]["content"] == ""


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1},
        {"best_of": 1},
        {"stream": False},
        {"echo": False},
        {"logprobs": False},
        {"logprobs": None},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"suffix": ""},
        {"skip_special_tokens": True},
        {"spaces_between_special_tokens": True},
        {"prompt_cache_retention": "24h"},
        {"stop": None},
        {"stream": None},
        {"stream_options": None},
        {"seed": None},
        {"echo": None},
        {"response_format": {"type": "text"}},
        {"metadata": {"k": "v"}},
    ],
)
def test_values_that_change_nothing_are_accepted(body):
    assert parse(batch({"prompt": "hi"} | body)).prompt == TextPrompt("hi")


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {"suffix": "x"},
        {"tools": [{}]},
        {"tool_choice": "required"},
        {"truncate_prompt_tokens": 3},
        {"return_token_ids": 0},
    ],
)
def test_what_is_not_offered_is_refused_by_name(body):
    with pytest.raises(UserError, match=f"{next(iter(body))}=.* not supported"):
        parse(batch({"prompt": "hi"} | body))


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"n": 2}, "n", 2),
        ({"best_of": 3}, "best_of", 3),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": 5}, "logprobs", 5),
        ({"presence_penalty": 0.1}, "presence_penalty", 0.1),
        ({"frequency_penalty": -1}, "frequency_penalty", -1),
        ({"logit_bias": {"5": 1}}, "logit_bias", {5: 1}),
        ({"bad_words": "no"}, "bad_words", ("no",)),
        ({"stop_token_ids": [4]}, "stop_token_ids", (4,)),
        ({"logits_processors": {"mine": [1, "a"]}}, "logits_processors", {"mine": [1, "a"]}),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["simple", "batch"])
def test_sampling_fields_are_read(body, field, value, wrapped):
    line = {"prompt": "hi"} | body
    assert getattr(parse(batch(line) if wrapped else line).sampling, field) == value


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": None}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_chat_logprobs_are_a_flag_and_a_count(fields, count):
    assert parse(chat("hi", **fields)).sampling.logprobs == count


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprobs": 3}, "logprobs must be true or false"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs must be from 0 to 20"),
        ({"echo": True}, "echo is for completions"),
    ],
)
def test_chat_logprobs_that_make_no_sense_are_refused(fields, says):
    with pytest.raises(UserError, match=says):
        parse(chat("hi", **fields))


def test_echo_with_logprobs_brings_the_prompts():
    sampling = parse(batch({"prompt": "hi", "echo": True, "logprobs": 2})).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 2)


def test_no_tokens_are_for_an_echo_alone():
    parsed = parse(batch({"prompt": "hi", "echo": True, "max_tokens": 0, "logprobs": 1}))
    assert parsed.prompt_alone and (parsed.sampling.max_tokens, parsed.sampling.prompt_logprobs) == (1, 1)
    for body in ({}, {"echo": False}):
        with pytest.raises(UserError, match="max_tokens"):
            parse(batch({"prompt": "hi", "max_tokens": 0} | body))
    assert not parse(batch({"prompt": "hi", "echo": True})).prompt_alone


@pytest.mark.parametrize(
    ("field", "name"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("top_kk", "top_k")]
)
def test_unknown_field_that_is_nearly_one_is_told(field, name):
    with pytest.raises(UserError, match=f"unknown field `{field}`; did you mean {name!r}") as caught:
        parse(batch({"prompt": "hi", field: 1}))
    assert caught.value.field == field


def test_whole_numbers_may_have_a_fraction_of_none():
    fields = {"max_tokens": 5.0, "seed": 3.0, "n": 2.0, "logprobs": 1.0, "prompt": [[3.0, 4.0]]}
    parsed = parse(batch(fields))
    assert parsed.prompt == TokensPrompt([3, 4])
    sampling = parsed.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.n, sampling.logprobs) == (5, 3, 2, 1)
    for number in (5.5, 1e300):
        with pytest.raises(UserError, match="max_tokens"):
            parse(batch({"prompt": "hi", "max_tokens": number}))


def test_salt_goes_with_the_prompt():
    assert parse({"prompt": "hi", "cache_salt": "a"}).cache_salt == "a"
    assert parse(batch({"prompt": "hi", "cache_salt": "a"})).cache_salt == "a"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (batch({"prompt": "hi", "spice": 1}), "spice"),
        (batch({"prompt": "hi", "top_logprobs": 0}), "top_logprobs"),
        (batch({"prompt": "hi", "logprobs": True}), "logprobs must be a number"),
        (batch({"prompt": "hi"}, method="GET"), "GET"),
        (batch({"prompt": "hi"}, url="/v1/responses"), "/v1/responses"),
        (batch({"prompt": "hi"}, EMBEDDINGS_URL), "prompt"),
        (batch({"prompt": "hi"}, extra=1), "extra"),
        (batch({}), "prompt"),
        (batch({"messages": []}), "messages"),
        (batch({"prompt": "hi"}, CHAT_URL), "prompt"),
        (chat([{"type": "image_url", "image_url": "x"}]), "image_url|text"),
        (batch({"prompt": ["a", "b"]}), "prompt"),
        (batch("prompt"), "object"),
        ({"custom_id": "c"}, "method"),
        ({"body": {"prompt": "hi"}}, "custom_id"),
        (batch({"prompt": "hi"}, custom_id=5), "custom_id"),
    ],
)
def test_broken_batch_lines_are_refused(line, says):
    with pytest.raises(UserError, match=says):
        parse(line)
