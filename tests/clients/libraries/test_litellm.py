"""LiteLLM over chat completions, responses and messages."""

from __future__ import annotations

import json

import pytest
from client_service import KEY, MODEL, QUESTION, TOO_LONG, TWO_CALLS, WEATHER, writing

litellm = pytest.importorskip("litellm")

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def ask(request, url):
    def ask(text: str = QUESTION, api_key: str = KEY, **fields):
        fields = {"temperature": 0, "max_tokens": 400, "num_retries": 0} | fields
        base = url if request.param == "anthropic" else f"{url}/v1"
        messages = [{"role": "user", "content": text}]
        return litellm.completion(
            f"{request.param}/{MODEL}", messages=messages, api_base=base, api_key=api_key, **fields
        )

    ask.provider = request.param
    return ask


def test_answer_whole_and_streamed(ask):
    assert ask().choices[0].message.content == "42"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True)) == "42"


def test_forced_call_whole_and_streamed(ask):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    streamed = litellm.stream_chunk_builder(list(ask(stream=True, **fields)))
    for answer in (ask(**fields), streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_two_calls_and_thoughts(ask):
    if ask.provider == "anthropic":
        pytest.skip("Anthropic's API has no field that makes this model write these")
    calls = ask(tools=TOOLS, extra_body=writing(TWO_CALLS)).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    message = ask(extra_body=writing("<think>\nAdd.\n</think>\n\n42")).choices[0].message
    assert (message.reasoning_content, message.content) == ("Add.", "42")


def test_json_schema(ask):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    assert json.loads(ask(response_format=form).choices[0].message.content)["name"] in ("Ada", "Bob")


def test_errors(ask):
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(TOO_LONG)
    with pytest.raises(litellm.AuthenticationError):
        ask(api_key="wrong")


def test_responses(url):
    answer = litellm.responses(QUESTION, f"openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY, temperature=0)
    assert answer.output[0].content[0].text == "42"
