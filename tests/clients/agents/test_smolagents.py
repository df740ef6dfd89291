"""smolagents: its OpenAI model, and agents that call tools and write code."""

from __future__ import annotations

import pytest
from client_service import KEY, MODEL, QUESTION, TOO_LONG, writing

smolagents = pytest.importorskip("smolagents")

MESSAGES = [{"role": "user", "content": QUESTION}]
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42"}}\n</tool_call>'


@smolagents.tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"sunny in {city}"


@pytest.fixture
def make(url):
    def make(api_key: str = KEY, **fields):
        fields = {"temperature": 0, "max_tokens": 400} | fields
        return smolagents.OpenAIModel(MODEL, api_base=f"{url}/v1", api_key=api_key, **fields)

    return make


def test_answer_whole_and_streamed(make):
    assert make().generate(MESSAGES).content == "42"
    assert "".join(delta.content or "" for delta in make().generate_stream(MESSAGES)) == "42"


def test_forced_call(make):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert make().generate(MESSAGES, response_format=form).content.startswith("{")
    message = make(
        extra_body=writing('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    )
    calls = message.generate(MESSAGES, tools_to_call_from=[get_weather], tool_choice="auto").tool_calls
    assert [call.function.name for call in calls] == ["get_weather"]


def with_short_prompt(agent):
    """The prompts of agents are longer than this model's context."""
    agent.prompt_templates["system_prompt"] = "Answer."
    return agent


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_agent_that_calls_tools(make, stream):
    model = make(extra_body=writing(FINAL), tool_choice="auto")
    agent = smolagents.ToolCallingAgent([get_weather], model, stream_outputs=stream, max_steps=1, verbosity_level=0)
    assert with_short_prompt(agent).run(QUESTION) == "42"


def test_agent_that_writes_code(make):
    text = "Thought: I add.\n<code>\nfinal_answer(17 + 25)\n</code>"
    agent = smolagents.CodeAgent([], make(extra_body=writing(text)), max_steps=1, verbosity_level=0)
    assert with_short_prompt(agent).run(QUESTION) == 42


def test_errors(make):
    with pytest.raises(Exception, match="maximum context length"):
        make().generate([{"role": "user", "content": TOO_LONG}])
    with pytest.raises(Exception, match="401"):
        make(api_key="wrong").generate(MESSAGES)
