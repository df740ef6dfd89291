"""PromptAnswers: texts that come side by side are shown one after another."""

from __future__ import annotations

from labinfer.cli.commands.prompt_answers import PromptAnswers
from labinfer.requests.outputs import Completion, Delta, RequestOutput


def delta(key: int, text: str) -> Delta:
    return Delta(key=key, index=0, text=text, token_ids=[1], finish_reason=None)


def output(key: int, *texts: str) -> RequestOutput:
    completions = [
        Completion(index=n, text=text, token_ids=[1], finish_reason="stop", stop_reason=None, logprobs=None)
        for n, text in enumerate(texts)
    ]
    return RequestOutput(
        key=key,
        prompt_token_ids=[1],
        completions=completions,
        prompt_logprobs=None,
        num_cached_tokens=0,
        num_output_tokens=len(texts),
        time_to_first_token=0.1,
        time_per_output_token=0.1,
        total_time=0.1,
    )


def test_first_answer_is_shown_as_it_grows_and_later_ones_when_its_turn_has_ended():
    shown: list[str] = []
    answers = PromptAnswers(["a?", "b?"], shown.append)
    for key, text in ((0, "x"), (1, "u"), (0, "y"), (1, "v")):
        answers.grow(delta(key, text))
    assert "".join(shown) == "--- a?\nxy"
    answers.end(output(1, "uv"), has_grown=True)
    assert "".join(shown) == "--- a?\nxy"
    answers.end(output(0, "xy"), has_grown=True)
    answers.close()
    assert "".join(shown) == "--- a?\nxy\n--- b?\nuv\n"


def test_answers_that_do_not_stream_come_whole_each_on_a_line():
    shown: list[str] = []
    answers = PromptAnswers([""], shown.append)
    answers.end(output(0, "one", "two"), has_grown=False)
    answers.close()
    assert "".join(shown) == "one\ntwo\n"


def test_line_of_an_answer_that_is_broken_off_is_ended():
    shown: list[str] = []
    answers = PromptAnswers([""], shown.append)
    answers.grow(delta(0, "half"))
    answers.close()
    assert "".join(shown) == "half\n"
