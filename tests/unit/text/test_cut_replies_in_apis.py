"""Replies cut at every token of a call, as chats, responses and messages tell them, whole and streamed."""

from __future__ import annotations

import json

import msgspec
import pytest
from reply_reading import parse
from reply_samples import ONE_CALL, THOUGHTS, TOOLS, TWO_CALLS
from reply_tokenizer import CHAT, write_tokenizer

from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import AnswerUpdate, FinishReason, Request
from labinfer.requests.anthropic.messages import BlockDelta, BlockStart, InputDelta, MessageWriter, stop_reason
from labinfer.requests.openai.api_object import count_usage
from labinfer.requests.openai.chat import chat_choice, chat_messages, reply_delta
from labinfer.requests.openai.response_body import ResponseBody
from labinfer.requests.openai.response_events import ArgumentsDone, OutputItemDone, ResponseIncomplete, ResponseWriter
from labinfer.requests.openai.responses import new_response
from labinfer.requests.outputs import RequestState
from labinfer.text.reply_format import load_built_in
from labinfer.text.reply_reader import ReplyReader
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tools import ToolUse

USE = ToolUse.from_fields({"tools": TOOLS})
USAGE = count_usage(1, 1, 0, 0)
PROMPT = [5]


def cut_states(tokenizer: Tokenizer, text: str):
    """For each number of tokens, the state of a request that was cut off behind them, and the deltas of its stream."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.reply_decoder().decode(token_ids) == text
    for count in range(1, len(token_ids) + 1):
        request = Request(key=0, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=count), is_chat=True)
        state, deltas = RequestState(request, tokenizer, streams=True), []
        for number, token_id in enumerate(token_ids[:count], 1):
            reason = FinishReason.LENGTH if number == count else None
            state.add(AnswerUpdate(index=0, token_ids=[token_id], finish_reason=reason))
            deltas.append(state.take_delta(0))
        yield state, deltas


def whole_chat(tokenizer: Tokenizer, state: RequestState) -> tuple[str, list[tuple[str, str]]]:
    output = state.output()
    (message,), _ = chat_messages(output, tokenizer, USE)
    assert chat_choice(output.completions[0], message, output, tokenizer).finish_reason == "length"
    calls = message.tool_calls or []
    return message.content or "", [(call.function.name, call.function.arguments) for call in calls]


def streamed_chat(tokenizer: Tokenizer, deltas) -> tuple[str, list[tuple[str, str]]]:
    reader, content, calls = ReplyReader(tokenizer, PROMPT, USE), "", []
    for delta in deltas:
        for event in reader.read(delta.text, delta.finish_reason):
            fields = msgspec.to_builtins(reply_delta(event, len(calls)))
            content += fields.get("content", "")
            calls += [
                (call["function"]["name"], call["function"]["arguments"]) for call in fields.get("tool_calls", ())
            ]
    assert reader.finish_reason(deltas[-1].finish_reason) == "length"
    return content, calls


def response(tokenizer: Tokenizer, pieces: list[tuple[str, str | None]]) -> tuple[str, list[tuple[str, str]]]:
    reader = ReplyReader(tokenizer, PROMPT, USE)
    writer = ResponseWriter(new_response("resp_1", 1, "m", ResponseBody(input="hi"), SamplingParams()), tokenizer)
    events = list(writer.begin())
    for text, reason in pieces:
        events += writer.add(reader.read(text, reason), None)
    events += writer.end("length", USAGE, 1)
    told = writer.response
    assert isinstance(events[-1], ResponseIncomplete)
    assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    items = [msgspec.to_builtins(item) for item in told.output]
    assert items == [msgspec.to_builtins(event.item) for event in events if isinstance(event, OutputItemDone)]
    calls = [item for item in items if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == [e.arguments for e in events if isinstance(e, ArgumentsDone)]
    for call in calls:
        assert call["status"] == ("completed" if is_object(call["arguments"]) else "incomplete")
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    return "".join(texts), [(call["name"], call["arguments"]) for call in calls]


def message(tokenizer: Tokenizer, pieces: list[tuple[str, str | None]]) -> tuple[str, list[tuple[str, dict]]]:
    reader = ReplyReader(tokenizer, PROMPT, USE)
    writer = MessageWriter("msg_1", "m", USAGE, shows_reasoning=True)
    events = list(writer.begin())
    for text, reason in pieces:
        events += writer.add(reader.read(text, reason))
    events += writer.end(*stop_reason(reader.finish_reason("length"), None), USAGE)
    assert writer.message.stop_reason == "max_tokens"
    blocks = [msgspec.to_builtins(block) for block in writer.message.content]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    streamed = [e.delta.partial_json for e in events if isinstance(e, BlockDelta) and isinstance(e.delta, InputDelta)]
    assert [json.loads(text) for text in streamed] == [block["input"] for block in uses]
    assert len(blocks) == sum(isinstance(event, BlockStart) for event in events)
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts), [(block["name"], block["input"]) for block in uses]


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


SAMPLES = [("one", name) for name in sorted(ONE_CALL)]
SAMPLES += [pytest.param("two", name, marks=pytest.mark.slow) for name in sorted(TWO_CALLS)]


@pytest.mark.parametrize(("count", "name"), SAMPLES)
def test_reply_cut_at_every_token_is_told_as_calls_in_every_api(count, name, tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, CHAT, response_template=load_built_in(name).source))
    thought, _ = THOUGHTS.get(name, ("", ""))
    text = thought + (ONE_CALL if count == "one" else TWO_CALLS)[name]
    whole, most = parse(name, text), 0
    for state, deltas in cut_states(tokenizer, text):
        content, calls = whole_chat(tokenizer, state)
        assert content == ""
        assert most <= len(calls) <= len(whole.calls)
        most = len(calls)
        for (called, arguments), other in zip(calls, whole.calls, strict=False):
            assert called == other.name and other.arguments.startswith(arguments)
        assert streamed_chat(tokenizer, deltas) == ("", calls)
        streamed = [(delta.text, delta.finish_reason) for delta in deltas]
        for pieces in ([(state.output().text, "length")], streamed):
            assert response(tokenizer, pieces) == ("", calls)
            text_of_message, uses = message(tokenizer, pieces)
            assert text_of_message == "" and [used for used, _ in uses] == [called for called, _ in calls]
            for (_, used), (_, arguments) in zip(uses, calls, strict=True):
                assert not is_object(arguments) or used == json.loads(arguments)
    assert [arguments for _, arguments in calls] == [call.arguments for call in whole.calls]
