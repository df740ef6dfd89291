"""dspy: its language model over LiteLLM, and a prediction by its adapters."""

from __future__ import annotations

from typing import Literal

import pytest
from client_service import KEY, MODEL, QUESTION, TOO_LONG, writing

dspy = pytest.importorskip("dspy")


def make(url: str, api_key: str = KEY, **fields):
    fields = {"temperature": 0, "max_tokens": 400, "cache": False, "num_retries": 0} | fields
    return dspy.LM(f"openai/{MODEL}", api_base=f"{url}/v1", api_key=api_key, **fields)


class Choice(dspy.Signature):
    """Choose a colour."""

    question: str = dspy.InputField()
    colour: Literal["red", "green"] = dspy.OutputField()


def text_of(answer) -> str:
    return answer["text"] if isinstance(answer, dict) else answer


def test_answer(url):
    assert text_of(make(url)(QUESTION)[0]) == "42"


def test_prediction_by_the_chat_adapter(url):
    text = "[[ ## colour ## ]]\nred\n\n[[ ## completed ## ]]"
    with dspy.context(lm=make(url, extra_body=writing(text))):
        assert dspy.Predict(Choice)(question="Which?").colour == "red"


def test_prediction_by_the_json_adapter(url):
    lm15 = dspy.lm15
    access = lm15.AccessPolicy(provider="labinfer", env_keys=(), base_url=f"{url}/v1")
    definition = lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat())
    lm15.register_provider(definition, supports=lm15.ModelSupport(response_schema=True))
    lm = dspy.LM(f"labinfer/{MODEL}", api_key=KEY, temperature=0, max_tokens=400, cache=False, num_retries=0)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Choice)(question="Which?").colour in ("red", "green")


def test_errors(url):
    with pytest.raises(Exception, match="maximum context length|[Cc]ontext"):
        make(url)(TOO_LONG)
    with pytest.raises(Exception, match="401|API key"):
        make(url, api_key="wrong")(QUESTION)
