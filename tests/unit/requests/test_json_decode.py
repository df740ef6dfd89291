"""Bodies of requests: unknown fields that are ignored where that is asked for, and what is refused all the same."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from labinfer.requests import json_decode
from labinfer.requests.json_decode import MAX_IGNORED, MAX_ITEMS, MAX_PARTS, WrongBody, check_num_values, decode_json
from labinfer.requests.protocol import ChatBody

BODY = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}


def read(body: dict, ignored: list[str] | None = None) -> ChatBody:
    return decode_json(json.dumps(body).encode(), ChatBody, ignored)


def test_unknown_fields_are_left_out_at_any_depth():
    body = json.loads(json.dumps(BODY)) | {"nonsense": {"a": 1}, "stream_options": {"include_usage": True, "extra": 5}}
    body["messages"][0]["content"][0]["annotations"] = []
    body["max_tokens"] = 3.0
    with pytest.raises(WrongBody, match="unknown field"):
        read(body)
    ignored: list[str] = []
    parsed = read(body, ignored)
    assert sorted(ignored) == ["annotations", "extra", "nonsense"]
    assert parsed.stream_options.include_usage and parsed.max_tokens == 3
    assert parsed.messages == read(BODY).messages


def test_wrong_fields_are_refused_all_the_same():
    with pytest.raises(WrongBody) as caught:
        read(BODY | {"nonsense": 1, "max_tokens": "x"}, [])
    assert caught.value.field == "max_tokens"
    with pytest.raises(WrongBody, match="unknown field"):
        read(BODY | {f"x{index}": 1 for index in range(MAX_IGNORED + 1)}, [])


@pytest.mark.parametrize("name", ["a\nb\x1b[31m", "a`\r\nb", "x" * 10**6])
def test_names_of_unknown_fields_are_told_in_one_short_printable_line(name):
    with pytest.raises(WrongBody, match="unknown field") as caught:
        read(BODY | {name: 1})
    text = f"{caught.value} {caught.value.field}"
    assert text.isprintable() and len(text) < 2000


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b'{"a": 1, "b": ' + b"[" * 100_000, b'{"n": 1.0, "seed": ' + b"9" * 400]
)
def test_broken_body_is_one_error(data):
    with pytest.raises(WrongBody):
        decode_json(data, ChatBody, [])


@pytest.mark.parametrize(
    ("body", "place", "values"),
    [
        (
            {"reasoning_effort": "huge"},
            "$.reasoning_effort",
            '"high", "low", "max", "medium", "minimal", "none", "xhigh"',
        ),
        ({"response_format": {"type": "xml"}}, "$.response_format.type", '"text", "json_object", "json_schema"'),
        ({"tool_choice": "any"}, "$.tool_choice", '"auto", "none", "required"'),
        (
            {"messages": [{"role": "usr", "content": "hi"}]},
            "$.messages[0].role",
            '"assistant", "developer", "function", "system", "tool", "user"',
        ),
    ],
)
def test_value_that_is_none_of_those_listed_is_refused_with_the_list(body, place, values):
    with pytest.raises(WrongBody) as caught:
        read(BODY | body)
    assert str(caught.value).endswith(f" - at `{place}`; use one of {values}")


@pytest.mark.parametrize(
    ("bias", "key"),
    [
        ({"5": 1, "abc": 1, "6": 1}, "'abc'"),
        ({"-1": 1}, "'-1'"),
        ({"5": 1, "6": "x"}, "'6'"),
        ({"5": 1, "05": 1}, "'05'"),
        ({"99999999999": 1}, "'99999999999'"),
        ({str(number): 1 for number in range(20_000)} | {"last": 1}, "'last'"),
    ],
)
def test_wrong_entry_of_a_map_is_named(bias, key):
    with pytest.raises(WrongBody, match=rf"`\$.logit_bias(\[...\])?`: {key} is at fault$") as caught:
        read(BODY | {"logit_bias": bias})
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("value", ["x" * 1000, "a` - at `$.messages`", "\n", 5, None])
def test_no_value_breaks_the_list(value):
    with pytest.raises(WrongBody) as caught:
        read(BODY | {"response_format": {"type": value}})
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("data", "fits"),
    [
        (b"[" + b"1," * MAX_ITEMS + b"1]", True),
        (b"[" + b"1," * (MAX_ITEMS + 1) + b"1]", False),
        (b"[" + b"[]," * (MAX_PARTS - 1) + b"1]", True),
        (b"[" + b"{}," * MAX_PARTS + b"1]", False),
        (b"{" + b'"":1,' * MAX_PARTS + b'"":1}', False),
        (json.dumps(["[{:," * MAX_PARTS]).encode(), True),
        (json.dumps(['\\"{"\\' * MAX_PARTS, "{"]).encode(), True),
        (json.dumps([json.dumps([{"a": 1}] * MAX_PARTS)]).encode(), True),
        (json.dumps(["\\", {}] * MAX_PARTS).encode(), False),
        (json.dumps(["a" * (1 << 21), *[{}] * MAX_PARTS]).encode(), False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_are_counted_outside_of_strings(data, fits):
    json.loads(data)
    for given in (data, bytearray(data), msgspec.Raw(data)):
        if fits:
            check_num_values(given)
        else:
            with pytest.raises(WrongBody, match="the body has more than"):
                check_num_values(given)


def random_value(draw: random.Random, depth: int = 0):
    """A JSON value with strings that are rich in counted bytes, quotes and backslashes."""
    kind = draw.randrange(6 if depth < 3 else 3)
    if kind < 2:
        return "".join(draw.choice('a",\\{[: é') for _ in range(draw.randrange(6)))
    if kind == 2:
        return draw.choice([7, None, ""])
    if kind < 5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {f'{number}:"': random_value(draw, depth + 1) for number in range(draw.randrange(4))}


def num_values(value) -> tuple[int, int]:
    """Objects, arrays and keys of a value, and its commas."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    counts = [num_values(inner) for inner in (value.values() if isinstance(value, dict) else value)]
    own = 1 + isinstance(value, dict) * len(value), max(0, len(value) - 1)
    return tuple(map(sum, zip(own, *counts, strict=True)))


def test_counts_are_exact_wherever_a_scan_is_cut(monkeypatch):
    draw = random.Random(5)
    for _ in range(1000):
        value = [random_value(draw) for _ in range(draw.randrange(1, 6))]
        data, (num_parts, num_items) = json.dumps(value, ensure_ascii=False).encode(), num_values(value)
        monkeypatch.setattr(json_decode, "SCAN_BYTES", draw.choice([1, 2, 3, 5, 8, 64]))
        monkeypatch.setattr(json_decode, "MAX_ITEMS", num_items)
        monkeypatch.setattr(json_decode, "MAX_PARTS", num_parts)
        check_num_values(data)
        monkeypatch.setattr(json_decode, "MAX_PARTS", num_parts - 1)
        with pytest.raises(WrongBody):
            check_num_values(data)
