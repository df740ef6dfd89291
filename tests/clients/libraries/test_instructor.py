"""instructor in its modes: tools, JSON by a schema, JSON, and Markdown."""

from __future__ import annotations

from typing import Literal

import pytest
from client_service import KEY, MODEL

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


def ask(url: str, mode, api_key: str = KEY, **fields):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=60), mode=mode
    )
    messages = [{"role": "user", "content": 'Write a JSON object with name "Ada" and age 2.'}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Person, max_tokens=400, temperature=0, max_retries=0, **fields
    )


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_person(url, mode):
    assert isinstance(ask(url, instructor.Mode[mode]), Person)


def test_partial_answers(url):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60), mode=instructor.Mode.TOOLS
    )
    messages = [{"role": "user", "content": "Somebody."}]
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=messages, response_model=Person, max_tokens=400, temperature=0
        )
    )
    assert parts[-1].name in ("Ada", "Bob")


def test_bad_key(url):
    with pytest.raises(Exception, match="401|API key"):
        ask(url, instructor.Mode.TOOLS, api_key="wrong")
