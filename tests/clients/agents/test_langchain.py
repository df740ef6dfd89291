"""LangChain: ChatOpenAI over chat completions and responses, ChatAnthropic over messages."""

from __future__ import annotations

from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, THINKER, TOO_LONG, TWO_CALLS, writing

langchain_openai = pytest.importorskip("langchain_openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic")
core = pytest.importorskip("langchain_core")
pydantic = pytest.importorskip("pydantic")

from langchain_core.exceptions import ContextOverflowError  # noqa: E402 - after it is known to be there
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402


class Person(pydantic.BaseModel, extra="forbid"):
    """Somebody."""

    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


@tool
def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(params=["chat", "responses", "messages"])
def make(request, url):
    """Makes a chat model that speaks one of the three APIs."""

    def make(model: str = MODEL, api_key: str = KEY, **fields):
        fields = {"model": model, "api_key": api_key, "max_tokens": 400, "temperature": 0, "max_retries": 0} | fields
        if request.param == "messages":
            return langchain_anthropic.ChatAnthropic(base_url=url, **fields)
        is_responses = request.param == "responses"
        return langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", use_responses_api=is_responses, stream_usage=True, **fields
        )

    make.api = request.param
    return make


def test_answer_whole_and_streamed(make):
    llm = make()
    assert llm.invoke(QUESTION).text == "42"
    chunks = list(llm.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == "42"
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks)


def test_forced_call_whole_and_streamed(make):
    choice = {"chat": "required", "responses": "required", "messages": "any"}[make.api]
    llm = make().bind_tools([get_weather], tool_choice=choice)
    answer = llm.invoke(QUESTION)
    whole = None
    for chunk in llm.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    for message in (answer, whole):
        assert message.tool_calls and message.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
    results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert make(max_tokens=8).bind_tools([get_weather]).invoke([HumanMessage(QUESTION), answer, *results])


def test_two_calls_at_once(make):
    if make.api == "messages":
        pytest.skip("Anthropic's API has no field that makes this model write two calls")
    llm = make(extra_body=writing(TWO_CALLS)).bind_tools([get_weather])
    whole = None
    for chunk in llm.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    for message in (llm.invoke(QUESTION), whole):
        assert [call["args"] for call in message.tool_calls] == [
            {"city": "Rome", "days": 1},
            {"city": "Oslo", "days": 2},
        ]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(make, method):
    assert isinstance(make().with_structured_output(Person, method=method).invoke(QUESTION), Person)


def test_thoughts(make):
    if make.api == "messages":
        message = make(THINKER, thinking={"type": "enabled", "budget_tokens": 1024}, temperature=None).invoke(QUESTION)
    elif make.api == "responses":
        message = make(extra_body=writing("<think>\nAdd.\n</think>\n\n42")).invoke(QUESTION)
    else:
        pytest.skip("ChatOpenAI reads no thoughts out of chat completions, as its documentation says")
    assert any(block["type"] == "reasoning" for block in message.content_blocks)


def test_errors(make):
    with pytest.raises(ContextOverflowError):
        make().invoke(TOO_LONG)
    with pytest.raises(Exception, match="401"):
        make(api_key="wrong").invoke(QUESTION)
