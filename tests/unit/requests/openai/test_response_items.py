"""Items of the Responses API as messages of a chat template."""

from __future__ import annotations

import msgspec
import pytest

from labinfer.requests.openai.response_items import Item, as_messages


def messages(*items, instructions=None):
    return as_messages(msgspec.convert(list(items), list[Item]), instructions)


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
CALL_AS_SHOWN = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]}


def test_a_turn_of_the_assistant_is_one_message():
    turn, result, answer = messages(THOUGHT, SAID, CALL, CALL | {"call_id": "c2"}, OUTPUT, THOUGHT, SAID)[:3]
    assert turn == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Hm.",
        "tool_calls": [CALL_AS_SHOWN, CALL_AS_SHOWN | {"id": "c2"}],
    }
    assert result == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert answer == {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm."}


def test_instructions_and_system_messages_at_the_beginning_are_one():
    first, second, third = messages(
        {"role": "system", "content": "b"},
        {"role": "developer", "content": [{"type": "input_text", "text": "c"}]},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
        instructions="a",
    )
    assert first == {"role": "system", "content": "a\n\nb\n\nc"}
    assert (second["role"], third) == ("user", {"role": "system", "content": "e"})


def test_items_are_stored_with_ids_and_read_again_as_the_same():
    items = msgspec.convert([THOUGHT, SAID, CALL, OUTPUT, {"role": "user", "content": "x"}], list[Item])
    stored = [item.as_stored() for item in items]
    assert [item["id"].partition("_")[0] for item in stored] == ["rs", "msg", "fc", "fco", "msg"]
    assert as_messages(msgspec.convert(stored, list[Item]), None) == as_messages(items, None)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "computer_call", "id": "x"}, "computer_call"),
        ({"type": "message", "role": "user"}, "needs content"),
        ({"type": "function_call", "name": "f"}, "needs call_id and arguments"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input_file"),
        ({}, "needs id"),
    ],
)
def test_items_that_cannot_be_used_are_refused(item, text):
    with pytest.raises(msgspec.ValidationError, match=text):
        messages(item)
