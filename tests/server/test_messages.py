"""``/v1/messages`` as Anthropic's clients use it: answers, streams, tools, thoughts and errors."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from serving import Server, serving

from labinfer.requests.anthropic.messages import SIGNATURE

KEY = "key-of-somebody"
QUESTION = {"role": "user", "content": "17 + 25 = ?"}
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}


@pytest.fixture(scope="module")
def server():
    with serving("--dtype", "float32", "--num-kv-blocks", "1024", "--max-model-len", "512", "--api-key", KEY) as server:
        yield server
        assert "Traceback" not in server.text


@pytest.fixture(scope="module")
def ask(server: Server):
    def ask(*messages: dict, status: int = 200, path: str = "/v1/messages", **fields) -> dict[str, Any]:
        body = {"model": "demo", "max_tokens": 40, "temperature": 0, "messages": messages or [QUESTION]} | fields
        reply = server.ask("POST", path, body, **HEADERS)
        assert reply.status == status, reply.body
        return reply.body

    return ask


def stream(server: Server, **fields) -> list[dict[str, Any]]:
    """The events, each of which is called as its data says."""
    body = {"model": "demo", "max_tokens": 40, "temperature": 0, "messages": [QUESTION], "stream": True} | fields
    connection, response = server.open("POST", "/v1/messages", body, **HEADERS)
    with connection:
        text = response.read().decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events make up, by the rules of Anthropic's clients."""
    assert events[0]["type"] == "message_start"
    message, texts = (
        events[0]["message"],
        {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"},
    )
    pieces, is_open = "", False
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, pieces = True, ""
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                pieces += delta["partial_json"]
                block["input"] = json.loads(pieces)
            else:
                name = texts[delta["type"]]
                block[name] += delta[name]
        elif event["type"] == "content_block_stop":
            is_open = False
        elif event["type"] == "message_delta":
            assert not is_open
            message |= event["delta"] | {"usage": event["usage"]}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = message["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return message | {"id": "", "content": content, "usage": (total, usage["output_tokens"])}


class TestAnswers:
    def test_text_is_answered(self, ask):
        message = ask(metadata={"user_id": "me"}, system=[{"type": "text", "text": "Add.", "cache_control": {}}])
        assert message["content"] == [{"type": "text", "text": "42"}]
        assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "end_turn")
        assert message["usage"]["output_tokens"] > 0
        assert message["id"].startswith("msg_")

    def test_blocks_are_the_conversation_of_a_chat(self, server, ask):
        turns = [
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
            QUESTION,
        ]
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "hel\n\nlo"},
            {"role": "assistant", "content": "hi"},
            QUESTION,
        ]
        reply = server.ask("POST", "/v1/chat/completions", {"messages": messages, "temperature": 0}, KEY).body
        message = ask(*turns, system="Be short.")
        assert message["content"][0]["text"] == reply["choices"][0]["message"]["content"]
        count = {"model": "demo", "messages": turns, "system": "Be short."}
        counted = server.ask("POST", "/v1/messages/count_tokens", count, **HEADERS).body
        assert counted == {"input_tokens": reply["usage"]["prompt_tokens"]}

    def test_answer_goes_on_in_the_last_message(self, server, ask):
        turns = [QUESTION, {"role": "assistant", "content": "17 + 25 ="}]
        body = {"messages": turns, "temperature": 0, "max_tokens": 40}
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        reply = server.ask("POST", "/v1/chat/completions", body | fields, KEY).body
        message = ask(*turns)
        assert message["content"][0]["text"] == reply["choices"][0]["message"]["content"]
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == reply["usage"]["prompt_tokens"]

    @pytest.mark.parametrize(
        ("fields", "reason", "sequence"),
        [
            ({}, "end_turn", None),
            ({"max_tokens": 1}, "max_tokens", None),
            ({"stop_sequences": ["2"]}, "stop_sequence", "2"),
        ],
        ids=["whole", "cut", "stopped"],
    )
    def test_stream_comes_to_the_same(self, server, ask, fields, reason, sequence):
        whole = ask(**fields)
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        assert without_ids(joined(stream(server, **fields))) == without_ids(whole)

    def test_form_of_the_answer(self, ask):
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        for fields in (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}},
            {"output_format": {"type": "json_schema", "schema": schema}},
        ):
            assert json.loads(ask(**fields)["content"][0]["text"]) == {"a": 1}


class TestThoughts:
    def test_thoughts_may_be_asked_for(self, ask):
        fields = {"thinking": {"type": "enabled", "budget_tokens": 16}, "temperature": 1.0}
        assert ask(**fields)["content"][-1]["type"] == "text"

    def test_thoughts_that_come_back_are_read(self, ask):
        thought = {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}
        past = {
            "role": "assistant",
            "content": [thought, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "42"}],
        }
        assert ask(QUESTION, past, QUESTION)["content"]


class TestTools:
    FIELDS = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 300}

    def test_call_that_is_forced_comes_and_goes_on(self, server, ask):
        message = ask(**self.FIELDS)
        (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
        assert (call["name"], message["stop_reason"]) == ("get_weather", "tool_use")
        assert call["input"]["days"] in (1, 2, 3)
        assert without_ids(joined(stream(server, **self.FIELDS))) == without_ids(message)
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And?"},
        ]
        turns = [QUESTION, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
        assert ask(*turns, tools=[TOOL])["usage"]["output_tokens"] > 0

    def test_one_tool_may_be_named_and_none_may_be_called(self, ask):
        named = ask(**self.FIELDS | {"tool_choice": {"type": "tool", "name": "get_weather"}})
        assert named["content"][-1]["type"] == "tool_use"
        assert ask(**self.FIELDS | {"tool_choice": {"type": "none"}, "max_tokens": 5})["stop_reason"] != "tool_use"


CALL = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
REFUSED = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "needs a name"),
    ({"messages": []}, "messages"),
    ({"messages": [QUESTION, {"role": "assistant", "content": [CALL]}]}, "the last message calls tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "role"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"messages": [{"role": "user", "content": "red " * 600}]}, "prompt is too long"),
]


class TestErrors:
    @pytest.mark.parametrize(("fields", "text"), REFUSED, ids=[text for _, text in REFUSED])
    def test_what_is_not_offered_is_refused_in_their_form(self, ask, fields, text):
        body = ask(status=400, **fields)
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert text in body["error"]["message"]
        assert body["request_id"]

    def test_threads_are_refused_by_the_code_that_clients_know(self, ask):
        error = ask(status=400, thread={"type": "create"})["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert "details" not in ask(status=400, mcp_servers=[{}])["error"]

    def test_every_error_has_their_form(self, server):
        body = {"model": "another", "max_tokens": 1, "messages": [QUESTION]}
        for status, kind, reply in (
            (401, "authentication_error", server.ask("POST", "/v1/messages", body)),
            (401, "authentication_error", server.ask("POST", "/v1/messages", body, **HEADERS | {"x-api-key": "wrong"})),
            (404, "not_found_error", server.ask("POST", "/v1/messages", body, **HEADERS)),
            (405, "invalid_request_error", server.ask("GET", "/v1/messages", **HEADERS)),
            (403, "permission_error", server.ask("POST", "/v1/messages", body, Origin="http://evil.example")),
        ):
            assert (reply.status, reply.body["error"]["type"]) == (status, kind), reply.body

    def test_key_of_either_header_is_taken(self, server):
        body = {"model": "demo", "max_tokens": 1, "messages": [QUESTION]}
        assert server.ask("POST", "/v1/messages", body, KEY).status == 200
        assert server.ask("GET", "/v1/models", **{"x-api-key": KEY}).status == 200


# Models, and paths that both APIs have, or neither.


def test_models_have_anthropics_form_for_its_clients(server):
    listed = server.ask("GET", "/v1/models", **HEADERS)
    (model,) = listed.body["data"]
    assert listed.body == {"data": [model], "has_more": False, "first_id": "demo", "last_id": "demo"}
    assert (model["type"], model["id"], model["display_name"]) == ("model", "demo", "demo")
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    assert model["max_input_tokens"] == 512
    assert server.ask("GET", "/v1/models/demo", **HEADERS).body == model
    for query, ids in (("?limit=1", ["demo"]), ("?after_id=demo", []), ("?before_id=demo", [])):
        page = server.ask("GET", f"/v1/models{query}", **HEADERS).body
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids, False)
    assert server.ask("GET", "/v1/models", key=KEY).body["object"] == "list"
    assert server.ask("GET", "/v1/models/demo", key=KEY).body["object"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/models/other", 404, "not_found_error"),
        ("GET", "/v1/models?limit=0", 400, "invalid_request_error"),
        ("GET", f"/v1/models?limit=000000001{5000 * '0'}", 400, "invalid_request_error"),
        ("POST", "/v1/models", 405, "invalid_request_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/nothing", 404, "not_found_error"),
    ],
)
def test_errors_have_anthropics_form_for_its_clients(server, method, path, status, kind):
    reply = server.ask(method, path, **HEADERS)
    assert (reply.status, reply.body["type"], reply.body["error"]["type"]) == (status, "error", kind)
    assert reply.body["request_id"] == reply.headers["x-request-id"]
    others = server.ask(method, path, key=KEY)
    if "limit" not in path:
        assert others.status == status and "code" in others.body["error"]
    without_key = {name: value for name, value in HEADERS.items() if name != "x-api-key"}
    assert server.ask("GET", "/v1/models", **without_key).body["error"]["type"] == "authentication_error"
