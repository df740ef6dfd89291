"""The request schema's bounds, and lines that are broken: every refusal is one clear error."""

from __future__ import annotations

import json

import msgspec
import pytest

from labinfer.base.errors import UserError
from labinfer.base.plan import SequenceStart
from labinfer.base.sampling_params import MAX_BAD_WORDS, MAX_COUNT, MAX_SEED, SamplingParams
from labinfer.comm import wire
from labinfer.engine.request import Request
from labinfer.engine.sequence import token_sampling
from labinfer.requests.generation_input import read_completion
from labinfer.requests.jsonl import parse_line, read_ids
from labinfer.requests.protocol import COMPLETIONS_URL, MAX_INPUTS, CompletionBody

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5, stop=("END",), seed=3)


def parse(line, defaults=DEFAULTS):
    return parse_line(line if isinstance(line, bytes) else json.dumps(line).encode(), defaults)


def batch(body, url=COMPLETIONS_URL, **other):
    return {"custom_id": "c-1", "method": "POST", "url": url, "body": body} | other


# Bounds.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 0.5),
        ("seed", 0.5),
        ("seed", "1"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", "x" * 257),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("ignore_eos", 1),
        ("prompt", 5),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["simple", "batch"])
def test_values_out_of_bounds_are_refused_by_name(field, value, wrapped):
    line = {"prompt": "hi", field: value}
    with pytest.raises(UserError) as caught:
        parse(batch(line) if wrapped else line)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 1.5),
        ("prompt_token_ids", ["a"]),
        ("prompt_token_ids", "a"),
        ("messages", [{"content": "no role"}]),
    ],
)
def test_other_fields_of_simple_lines_have_their_types(field, value):
    with pytest.raises(UserError, match=field):
        parse({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 1), ("temperature", 100), ("top_p", 1e-9), ("top_k", -1), ("seed", MAX_SEED), ("seed", 0)],
)
def test_values_at_the_bounds_are_accepted(field, value):
    assert getattr(parse({"prompt": "hi", field: value}).sampling, field) == value


@pytest.mark.parametrize(
    ("seed", "taken"), [(-1, MAX_SEED), (-(2**63), 0), (-(2**63) + 5, 5), (MAX_SEED + 1, 0), (2**70 + 3, 3)]
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["simple", "batch"])
def test_seeds_out_of_bounds_wrap_around(seed, taken, wrapped):
    line = {"prompt": "hi", "seed": seed}
    assert parse(batch(line) if wrapped else line).sampling.seed == taken


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"1e999"])
def test_numbers_that_are_none_are_refused(text):
    with pytest.raises(UserError):
        parse(b'{"prompt": "hi", "temperature": ' + text + b"}")


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_nan_is_out_of_bounds_for_python_callers_too(field):
    with pytest.raises(UserError, match=field):
        SamplingParams(**{field: float("nan")})


@pytest.mark.parametrize(("field", "value"), [("top_k", 2**70), ("top_k", 2**63), ("max_tokens", 2**70)])
def test_what_is_accepted_can_go_on_the_wire(field, value):
    """A number that fits no message would fail the whole group when its plan is sent; it is refused, or it travels."""
    try:
        s = parse({"prompt": "hi", field: value}).sampling
    except UserError:
        return
    wire.pack(SequenceStart(0, [1], token_sampling(Request(key=0, prompt_token_ids=[1], sampling=s), 0, [2])))


# Broken lines.


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b'{"prompt": "hi"',
        b'{"prompt": "hi"} {"prompt": "ho"}',
        b"prompt: hi",
        b"[]",
        b"5",
        b"null",
        b'"prompt"',
        b'{"prompt": "a\x01b"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"\xff": "hi"}',
        b"\xff\xfe{\x00}\x00",
        b"\x00" * 40,
        b"[" * 200_000,
        b'{"prompt":' * 200_000,
        b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": ' + b"[" * 200_000,
        b'{"custom_id": "c", "body": "\xff"}',
    ],
    ids=lambda line: repr(line[:24]),
)
def test_broken_line_is_a_user_error(line):
    with pytest.raises(UserError) as caught:
        parse(line)
    assert 0 < len(str(caught.value)) < 400


def test_deep_nesting_inside_a_body_is_a_user_error():
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(UserError):
        parse(b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": ' + deep + b"}}")


@pytest.mark.parametrize(
    ("line", "custom_id"),
    [
        (b'{"custom_id": "a", "nonsense": [}', None),
        (b'{"custom_id": "a", "method": 5}', "a"),
        (b'{"custom_id": 5}', None),
        (b'["custom_id"]', None),
        (b'{"custom_id": "\xff"}', None),
        (b"[" * 200_000, None),
        (b"", None),
    ],
)
def test_custom_id_of_a_refused_line_is_found_where_there_is_one(line, custom_id):
    assert read_ids(line)[0] == custom_id


def test_sampling_params_take_strings_and_lists_for_stop():
    assert SamplingParams(stop="x").stop == SamplingParams(stop=["x"]).stop == ("x",)
    assert SamplingParams(stop=None).stop == ()


def test_sampling_params_refuse_unknown_names():
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=5)


@pytest.mark.parametrize("value", [-1, MAX_COUNT + 1, 2**64, 10**400])
@pytest.mark.parametrize(
    ("field", "wrap"),
    [
        ("logit_bias", lambda value: {str(value): 1}),
        ("allowed_token_ids", lambda value: [value]),
        ("stop_token_ids", lambda value: [1, value]),
        ("prompt", lambda value: [value]),
        ("prompt", lambda value: [[1], [value]]),
        ("priority", lambda value: value if value > 0 else -(2**40)),
    ],
)
def test_ids_and_priorities_that_no_message_could_carry_are_refused(field, wrap, value):
    with pytest.raises(UserError, match=field):
        parse(batch({"prompt": "hi", field: wrap(value)}))


def test_id_that_is_there_again_costs_nothing():
    assert SamplingParams(allowed_token_ids=[3, 1, 3, 3, 1]).allowed_token_ids == (3, 1)
    assert SamplingParams(stop_token_ids=(2, 2)).stop_token_ids == (2,)
    assert SamplingParams(stop=["b", "b"]).stop == ("b", "b")


def test_bad_words_are_so_many_at_most():
    assert len(SamplingParams(bad_words=["a"] * MAX_BAD_WORDS).bad_words) == MAX_BAD_WORDS
    with pytest.raises(UserError, match="bad_words may have"):
        SamplingParams(bad_words=["a"] * (MAX_BAD_WORDS + 1))


@pytest.mark.parametrize(
    ("fields", "num_prompts", "num_answers"),
    [({"n": 128}, 17, 128), ({"best_of": 100}, 21, 100), ({"num_beams": 128, "temperature": 0}, 17, 128)],
)
def test_answers_to_one_request_are_bounded(fields, num_prompts, num_answers):
    def read(count: int):
        body = msgspec.convert({"prompt": ["a"] * count} | fields, CompletionBody)
        return read_completion(body, SamplingParams())

    assert num_prompts * num_answers > MAX_INPUTS >= (num_prompts - 1) * num_answers
    assert len(read(num_prompts - 1).prompts) == num_prompts - 1
    with pytest.raises(UserError, match=f"^prompt: {num_answers} outputs for each of {num_prompts} prompts"):
        read(num_prompts)
