"""outlines over its OpenAI model and its vLLM model, which sends every form of output."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, TOO_LONG

outlines = pytest.importorskip("outlines")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel, extra="forbid"):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("make", [outlines.from_openai, outlines.from_vllm], ids=["openai", "vllm"])
def test_answers_and_json(client, make):
    model = make(client, MODEL)
    assert model(QUESTION, temperature=0) == "42"
    assert "".join(model.stream(QUESTION, temperature=0)) == "42"
    Person.model_validate(json.loads(model(QUESTION, Person)))
    Person.model_validate(json.loads("".join(model.stream(QUESTION, Person))))


def test_forms_of_vllm(client):
    model = outlines.from_vllm(client, MODEL)
    assert model(QUESTION, Literal["red", "green"]) in ("red", "green")
    assert model(QUESTION, outlines.regex("(yes|no){2}")) in ("yesyes", "yesno", "noyes", "nono")
    assert model(QUESTION, outlines.cfg('start: "a" | "b"')) in ("a", "b")


def test_errors(client):
    with pytest.raises(Exception, match="maximum context length"):
        outlines.from_vllm(client, MODEL)(TOO_LONG)
    with pytest.raises(Exception, match="401|API key"):
        outlines.from_openai(client.with_options(api_key="wrong"), MODEL)(QUESTION)
