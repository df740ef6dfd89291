"""pydantic-ai over chat completions, responses and messages."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, THINKER, TOO_LONG, TWO_CALLS, writing

pydantic_ai = pytest.importorskip("pydantic_ai")
pydantic = pytest.importorskip("pydantic")

from pydantic_ai.exceptions import ModelHTTPError  # noqa: E402 - after it is known to be there
from pydantic_ai.messages import ThinkingPart, ToolReturnPart  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

SETTINGS = {"temperature": 0, "max_tokens": 400}


class Person(pydantic.BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


@pytest.fixture(params=["chat", "responses", "messages"])
def make(request, url):
    def make(name: str = MODEL, api_key: str = KEY):
        if request.param == "messages":
            return AnthropicModel(name, provider=AnthropicProvider(api_key=api_key, base_url=url))
        kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
        return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=api_key))

    make.api = request.param
    return make


def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def test_answer_whole_and_streamed(make):
    agent = pydantic_ai.Agent(make(), model_settings=SETTINGS)
    assert agent.run_sync(QUESTION).output == "42"

    async def ask() -> list[str]:
        async with agent.run_stream(QUESTION) as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    assert "".join(asyncio.run(ask())) == "42"


def test_conversation_goes_on(make):
    agent = pydantic_ai.Agent(make(), model_settings=SETTINGS)
    first = agent.run_sync(QUESTION)
    assert agent.run_sync(QUESTION, message_history=first.all_messages()).output


@pytest.mark.parametrize("kind", ["tool", "native"])
def test_output_type_whole_and_streamed(make, kind):
    if (make.api, kind) == ("messages", "native"):
        pytest.skip("pydantic-ai offers it to models of Anthropic's names only")
    output = {"tool": pydantic_ai.ToolOutput, "native": pydantic_ai.NativeOutput}[kind](Person)
    agent = pydantic_ai.Agent(make(), output_type=output, model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Person)

    async def ask() -> Person:
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()

    assert isinstance(asyncio.run(ask()), Person)


def test_two_calls_are_run(make):
    if make.api == "messages":
        pytest.skip("Anthropic's API has no field that makes this model write two calls")
    agent = pydantic_ai.Agent(make(), tools=[get_weather], model_settings=SETTINGS)

    async def first_steps() -> list:
        async with agent.iter(QUESTION, model_settings=SETTINGS | {"extra_body": writing(TWO_CALLS)}) as run:
            requests = 0
            async for node in run:
                requests += pydantic_ai.Agent.is_model_request_node(node)
                if requests == 2:
                    return node.request.parts
        return []

    parts = asyncio.run(first_steps())
    assert [part.content for part in parts if isinstance(part, ToolReturnPart)] == ["sunny in Rome", "sunny in Oslo"]


def test_thoughts(make):
    name, settings = MODEL, SETTINGS
    if make.api == "messages":
        name, settings = THINKER, {"max_tokens": 12, "anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}}
    else:
        settings = SETTINGS | {"extra_body": writing("<think>\nAdd.\n</think>\n\n42")}

    async def ask() -> list:
        agent = pydantic_ai.Agent(make(name))
        parts = []
        async with agent.iter(QUESTION, model_settings=settings) as run:
            async for node in run:
                if pydantic_ai.Agent.is_call_tools_node(node):
                    parts += node.model_response.parts
                    break
        return parts

    (thought,) = [part for part in asyncio.run(ask()) if isinstance(part, ThinkingPart)]
    if make.api == "responses":  # its content is a summary; it keeps the text itself beside that
        assert thought.provider_details["raw_content"] == ["Add."]
    else:
        assert thought.content


def test_errors(make):
    with pytest.raises(ModelHTTPError, match="maximum context length"):
        pydantic_ai.Agent(make()).run_sync(TOO_LONG)
    with pytest.raises(ModelHTTPError, match="401"):
        pydantic_ai.Agent(make(api_key="wrong")).run_sync(QUESTION)
