"""Anthropic's messages: conversations as chat templates take them, and replies as blocks."""

from __future__ import annotations

import msgspec
import pytest

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.requests.anthropic.errors import anthropic_error
from labinfer.requests.anthropic.message_body import MessageBody
from labinfer.requests.anthropic.messages import (
    SIGNATURE,
    MessageWriter,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    stop_reason,
)
from labinfer.requests.openai import api_errors
from labinfer.requests.openai.api_object import count_usage
from labinfer.text.reply_parts import Content, Reasoning, ToolCall

USAGE = count_usage(5, 7, 2, 3)
REPLY = [Reasoning("Hm"), Reasoning("."), Content("Let "), Content("me."), ToolCall("c1", "f", '{"a": 1}')]


def body(*messages, **fields) -> MessageBody:
    return msgspec.convert({"max_tokens": 5, "messages": list(messages)} | fields, MessageBody)


def test_turns_become_messages_of_a_chat():
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    prompt = body(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "d"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "c2"},
                {"type": "text", "text": "e"},
            ],
        },
        system="s",
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
    ).prompt()
    function = {"name": "f", "arguments": {"a": 1}}
    assert prompt.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nb"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "d", "tool_call_id": "c1"},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
        {"role": "user", "content": "e"},
    ]
    assert prompt.template_use.reasoning_effort == "high"
    assert prompt.template_use.chat_template_kwargs["enable_thinking"] is True


def test_fields_become_sampling():
    parsed = body({"role": "user", "content": "a"}, temperature=0.5, top_k=3, stop_sequences=["x"], tools=[]).parse(
        SamplingParams(top_p=0.9)
    )
    sampling = parsed.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (5, 0.5, 3, 0.9)
    assert sampling.stop == ("x",)


@pytest.mark.parametrize("shows_reasoning", [True, False])
def test_reply_becomes_blocks(shows_reasoning):
    writer = MessageWriter("msg_1", "demo", USAGE, shows_reasoning)
    events = [*writer.begin(), *writer.add(REPLY), *writer.end("tool_use", None, USAGE)]
    blocks = [ThinkingBlock("Hm.", SIGNATURE), TextBlock("Let me."), ToolUseBlock("c1", "f", {"a": 1})]
    assert writer.message.content == blocks[not shows_reasoning :]
    kinds = [event.__struct_config__.tag for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(writer.message.content)
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    usage = writer.message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 7)


def test_reply_without_text_has_an_empty_block():
    writer = MessageWriter("msg_1", "demo", USAGE, False)
    events = [*writer.add([Reasoning("Hm.")]), *writer.end("end_turn", None, USAGE)]
    assert writer.message.content == [TextBlock("")]
    assert len(events) == 4


def test_reasons_are_told_in_their_words():
    assert stop_reason("stop", None) == stop_reason("stop", 17) == ("end_turn", None)
    assert stop_reason("stop", "x") == ("stop_sequence", "x")
    assert stop_reason("length", None) == ("max_tokens", None)
    assert stop_reason("tool_calls", None) == ("tool_use", None)


def test_errors_are_told_in_their_words():
    error = anthropic_error(api_errors.too_long("9 tokens"), "id").error
    assert (error.type, error.message) == ("invalid_request_error", "prompt is too long: 9 tokens")
    assert anthropic_error(api_errors.overloaded("full", 1), None).error.type == "overloaded_error"
    assert anthropic_error(api_errors.internal(), None).error.type == "api_error"
    assert anthropic_error(api_errors.cancelled(), None).error.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [({"type": "enabled", "budget_tokens": 16}, 16), ({"type": "adaptive"}, None), ({"type": "disabled"}, None)],
)
def test_budget_of_thoughts_is_kept(thinking, budget):
    assert body({"role": "user", "content": "a"}, thinking=thinking).prompt().thinking_budget == budget


def test_last_message_of_the_assistant_is_gone_on_in():
    question = {"role": "user", "content": "a"}
    prompt = body(question, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}).prompt()
    assert (prompt.messages[-1]["content"], prompt.template_use.ending) == ("b", "in message")
    assert body(question).prompt().template_use.ending == "before answer"
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    with pytest.raises(UserError, match="the last message calls tools"):
        body(question, {"role": "assistant", "content": [call]}).prompt()
