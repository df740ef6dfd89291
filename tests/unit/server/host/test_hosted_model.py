"""HostedModel: what is counted of the steps of an engine."""

from __future__ import annotations

from types import SimpleNamespace

from labinfer.engine.request import AnswerUpdate
from labinfer.server.host.hosted_model import HostedModel


def counts_after(*steps: list[AnswerUpdate]) -> tuple[int, int, int]:
    """Prompt tokens, generated tokens and steps, after steps with these updates of one request with 7 prompt tokens."""
    batch = SimpleNamespace(plan=SimpleNamespace(num_tokens=3))
    news = [[("a request", update) for update in updates] for updates in steps]
    remaining = iter(news)
    driver, engine = SimpleNamespace(step=lambda launches: next(remaining)), SimpleNamespace(last_batch=batch)
    model = HostedModel(name="a", llm=SimpleNamespace(engine=engine, driver=driver), recommended={})
    model.unread_prompts["a request"] = 7
    for expected in news:
        assert model.step() == expected
    return model.prompt_tokens, model.generation_tokens, model.num_steps


def test_every_token_of_a_step_counts():
    first = AnswerUpdate(index=0, token_ids=[1, 2, 3], queue_seconds=0.1)
    assert counts_after([first], [AnswerUpdate(index=0, token_ids=[4, 5])]) == (7, 5, 2)


def test_prompt_counts_once_for_all_its_answers():
    answers = [AnswerUpdate(index=number, token_ids=[1], queue_seconds=0.1) for number in range(3)]
    assert counts_after(answers) == (7, 3, 1)


def test_beams_count_a_token_a_step_and_their_prompt_with_the_first():
    assert counts_after(*([AnswerUpdate(index=0)] for _ in range(4))) == (7, 4, 4)


def test_pooled_request_generates_nothing():
    assert counts_after([AnswerUpdate(index=0, embedding=[1.0], queue_seconds=0.1)]) == (7, 0, 1)
