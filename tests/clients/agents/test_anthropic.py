"""anthropic (Python) over /v1/messages."""

from __future__ import annotations

from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, THINKER, TOO_LONG, WEATHER

anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

FIELDS = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": QUESTION}]}
TOOLS = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER}]


class Person(pydantic.BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_whole_and_streamed(client):
    message = client.messages.create(**FIELDS)
    assert (message.content[0].text, message.stop_reason) == ("42", "end_turn")
    with client.messages.stream(**FIELDS) as stream:
        assert "".join(stream.text_stream) == "42"
        assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(model=MODEL, messages=FIELDS["messages"]).input_tokens
    usage = client.messages.create(**FIELDS).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_calls_whole_and_streamed(client):
    fields = FIELDS | {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**fields), streamed):
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use" and calls
        assert all(call.input["city"] in ("Rome", "Oslo") for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    turns = [
        *FIELDS["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert client.messages.create(**FIELDS | {"tools": TOOLS, "messages": turns, "max_tokens": 8}).content


def test_tool_runner_ends(client):
    @anthropic.beta_tool
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(**FIELDS, tools=[get_weather], tool_choice=choice, max_iterations=2)
    messages = list(runner)
    assert len(messages) == 2 and messages[0].stop_reason == "tool_use"


def test_parsed_answer(client):
    assert isinstance(client.messages.parse(**FIELDS, output_format=Person).parsed_output, Person)


def test_thoughts(client):
    fields = FIELDS | {"model": THINKER, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 12}
    with client.messages.stream(**fields) as stream:
        assert any(event.type == "thinking" for event in stream)
        block = stream.get_final_message().content[0]
    assert block.type == "thinking" and block.thinking
    past = [*FIELDS["messages"], {"role": "assistant", "content": [block]}, *FIELDS["messages"]]
    assert client.messages.create(**FIELDS | {"messages": past}).content


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError, match="maximum context length|too long"):
        client.messages.create(**FIELDS | {"messages": [{"role": "user", "content": TOO_LONG}]})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**FIELDS)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**FIELDS | {"model": "claude"})


def test_models_are_listed(client):
    models = list(client.models.list(limit=1))
    assert {MODEL, THINKER} <= {model.id for model in models}
    assert client.models.retrieve(MODEL).display_name == MODEL
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.body["error"]["type"] == "not_found_error"
