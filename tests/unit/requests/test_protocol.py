"""The request schema: what lines say, what is refused, and that every refusal is one clear error."""

from __future__ import annotations

import pytest
from request_lines import DEFAULTS, batch, chat, parse

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.prompts import TextPrompt, TokensPrompt, parse_prompt
from labinfer.requests.protocol import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL

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
    for wrong in (-1, 0):
        with pytest.raises(UserError, match="max_tokens must be at least 1"):
            parse(chat("hi", max_tokens=wrong, max_completion_tokens=4))
        with pytest.raises(UserError, match="^max_completion_tokens must be at least 1"):
            parse(chat("hi", max_tokens=4, max_completion_tokens=wrong))


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
        ({"logprobs": True, "top_logprobs": 21}, "^top_logprobs must be from 0 to 20"),
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


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("guided_json", 'structured_outputs with "json"'),
        ("max_new_tokens", "max_tokens"),
        ("do_sample", "temperature, "),
    ],
)
def test_unknown_field_of_another_engine_leads_to_ours(field, hint):
    with pytest.raises(UserError) as caught:
        parse(batch({"prompt": "hi", field: 1}))
    assert f"unknown field `{field}`; did you mean {hint}" in str(caught.value)


def test_unknown_field_of_an_inner_object_gets_no_hint_for_the_body():
    with pytest.raises(UserError) as caught:
        parse(batch({"prompt": "hi", "structured_outputs": {"guided_json": 1}}))
    assert str(caught.value).endswith("unknown field `guided_json` - at `$.structured_outputs`")


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
