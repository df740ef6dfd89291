"""openai (Python), as its users call it; tests/server has every route and field through the same client."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, THINKER, TOO_LONG, TWO_CALLS, WEATHER, writing

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]


class Person(pydantic.BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_chat_whole_and_streamed(client):
    fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    assert client.chat.completions.create(**fields).choices[0].message.content == "42"
    with client.chat.completions.stream(**fields) as stream:
        events = list(stream)
        assert stream.get_final_completion().choices[0].message.content == "42"
    assert "".join(event.delta for event in events if event.type == "content.delta") == "42"


def test_many_at_once(url):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            calls = [client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0) for _ in range(16)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == ["42"] * 16


def test_two_calls_streamed(client):
    fields = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "extra_body": writing(TWO_CALLS)}
    expected = [{"city": "Rome", "days": 1}, {"city": "Oslo", "days": 2}]
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion()
    for answer in (client.chat.completions.create(**fields), streamed):
        calls = answer.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == expected
        assert answer.choices[0].finish_reason == "tool_calls" and len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    past = streamed.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    after = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, past, *results], tools=TOOLS, max_tokens=8, temperature=0
    )
    assert after.usage.completion_tokens


def test_parsed_answer(client):
    fields = {"model": MODEL, "messages": MESSAGES, "response_format": Person}
    assert isinstance(client.chat.completions.parse(**fields).choices[0].message.parsed, Person)
    with client.chat.completions.stream(**fields) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_thoughts(client):
    fields = {"model": MODEL, "messages": MESSAGES, "extra_body": writing("<think>\nAdd.\n</think>\n\n42")}
    message = client.chat.completions.create(**fields).choices[0].message
    assert (message.reasoning_content, message.content) == ("Add.", "42")


def test_responses_whole_streamed_parsed_and_gone_on_from(client):
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert first.output_text == "42"
    with client.responses.stream(model=MODEL, input=QUESTION, previous_response_id=first.id, temperature=0) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().status == "completed"
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


def test_responses_two_calls_and_thoughts(client):
    tools = [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}]
    fields = {"model": MODEL, "input": QUESTION, "tools": tools}
    with client.responses.stream(**fields, extra_body=writing(f"<think>\nAsk.\n</think>\n\n{TWO_CALLS}")) as stream:
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"} for item in response.output[1:]
    ]
    after = client.responses.create(
        model=MODEL, input=results, previous_response_id=response.id, tools=tools, max_output_tokens=8
    )
    assert after.usage.output_tokens


def test_completions_embeddings_and_models(client):
    chunks = client.completions.create(model=MODEL, prompt="red", max_tokens=4, stream=True)
    assert sum(len(chunk.choices) for chunk in chunks)
    assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2
    assert {model.id for model in client.models.list()} == {MODEL, THINKER}


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model=MODEL, input=QUESTION)
