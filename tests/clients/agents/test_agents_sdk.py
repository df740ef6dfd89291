"""OpenAI's Agents SDK (Python) over chat completions and over responses."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, TOO_LONG, TWO_CALLS, writing

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

agents.set_tracing_disabled(True)  # traces would go to OpenAI
APIS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


class Person(pydantic.BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


@agents.function_tool
def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(params=APIS)
def model(request, url):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
    return lambda: APIS[request.param](model=MODEL, openai_client=client)


def agent(model, settings: dict | None = None, **fields):
    settings = agents.ModelSettings(**{"temperature": 0, "max_tokens": 400} | (settings or {}))
    return agents.Agent(name="Someone", model=model, model_settings=settings, **fields)


def test_answer(model):
    assert agents.Runner.run_sync(agent(model()), QUESTION).final_output == "42"


def test_streamed_answer(model):
    async def ask() -> str:
        run = agents.Runner.run_streamed(agent(model()), QUESTION)
        raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        return "".join(event.delta for event in raw if event.type == "response.output_text.delta")

    assert asyncio.run(ask()) == "42"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_forced_call_is_run_and_answered(model, stream):
    async def ask():
        someone = agent(model(), {"tool_choice": "required"}, tools=[get_weather])
        if not stream:
            return await agents.Runner.run(someone, QUESTION)
        run = agents.Runner.run_streamed(someone, QUESTION)
        async for _ in run.stream_events():
            pass
        return run

    kinds = [item.type for item in asyncio.run(ask()).new_items]
    assert kinds[0] == "tool_call_item" and "tool_call_output_item" in kinds and kinds[-1] == "message_output_item"


def test_two_calls_at_once(model):
    someone = agent(
        model(), {"extra_body": writing(TWO_CALLS)}, tools=[get_weather], tool_use_behavior="stop_on_first_tool"
    )
    items = agents.Runner.run_sync(someone, QUESTION).new_items
    assert [item.type for item in items] == ["tool_call_item"] * 2 + ["tool_call_output_item"] * 2


def test_output_type(model):
    assert isinstance(agents.Runner.run_sync(agent(model(), output_type=Person), QUESTION).final_output, Person)


def test_thoughts(model):
    run = agents.Runner.run_sync(agent(model(), {"extra_body": writing("<think>\nAdd.\n</think>\n\n42")}), QUESTION)
    assert [item.type for item in run.new_items] == ["reasoning_item", "message_output_item"]
    after = agents.Runner.run_sync(agent(model(), {"max_tokens": 8}), [*run.to_input_list(), *turn(QUESTION)])
    assert after.raw_responses


def turn(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_errors(model, url):
    with pytest.raises(openai.BadRequestError) as caught:
        agents.Runner.run_sync(agent(model()), TOO_LONG)
    assert caught.value.code == "context_length_exceeded"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        agents.Runner.run_sync(agent(agents.OpenAIResponsesModel(MODEL, client)), QUESTION)
