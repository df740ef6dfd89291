"""llama-index through OpenAILike: chats, completions, tools and structured output."""

from __future__ import annotations

from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, TOO_LONG

openai_like = pytest.importorskip("llama_index.llms.openai_like")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel, extra="forbid"):
    """Somebody."""

    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


class Place(pydantic.BaseModel, extra="forbid"):
    """Arguments of a tool."""

    city: Literal["Rome", "Oslo"]


def make(url: str, api_key: str = KEY, **fields):
    fields = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 400, "temperature": 0} | fields
    return openai_like.OpenAILike(
        model=MODEL, api_base=f"{url}/v1", api_key=api_key, context_window=2048, max_retries=0, timeout=60, **fields
    )


def test_answer_whole_and_streamed(url):
    llm = make(url)
    assert llm.complete(QUESTION).text == "42"
    assert "".join(piece.delta or "" for piece in llm.stream_complete(QUESTION)) == "42"
    assert make(url, is_chat_model=False, max_tokens=4).complete("red blue").text


def test_forced_call(url):
    from llama_index.core.tools import FunctionTool

    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    llm = make(url)
    tools = [FunctionTool.from_defaults(get_weather, fn_schema=Place)]
    (call, *_) = llm.get_tool_calls_from_response(llm.chat_with_tools(tools, QUESTION, tool_required=True))
    assert call.tool_kwargs["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("by_schema", [False, True], ids=["tool", "schema"])
def test_structured_output(url, by_schema):
    llm = make(url, should_use_structured_outputs=by_schema)
    assert isinstance(llm.as_structured_llm(Person).complete("Somebody.").raw, Person)


def test_errors(url):
    with pytest.raises(Exception, match="maximum context length"):
        make(url).complete(TOO_LONG)
    with pytest.raises(Exception, match="401|API key"):
        make(url, api_key="wrong").complete(QUESTION)
