"""Requests made of conversations: bounds of thoughts, and answers that go on in a message."""

from __future__ import annotations

import pytest
from reply_tokenizer import CHAT, write_tokenizer

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.request import AnswerUpdate, FinishReason
from labinfer.requests.input_processor import InputProcessor
from labinfer.requests.outputs import RequestState
from labinfer.requests.prompts import ChatPrompt, TemplateUse, parse_prompt
from labinfer.text.tools import Function, Tool, ToolUse


@pytest.mark.parametrize(
    ("template", "variables", "opening"),
    [
        ("<tool_call></think>" + CHAT, {"thinking": True}, []),
        ("<tool_call></think>" + CHAT, {}, ["<think>"]),
        ("<tool_call></think>" + CHAT + "<think>\n\n</think>\n\n", {}, None),
        (CHAT, {}, None),
    ],
    ids=["opened by the prompt", "opened by the model", "closed by the prompt", "none"],
)
def test_thoughts_are_bounded_by_the_tokens_that_mark_them(tmp_path, template, variables, opening):
    reader = InputProcessor(write_tokenizer(tmp_path, template), required=True)
    marks = reader.tokenizer.added_tokens
    messages = [{"role": "user", "content": "hi"}]
    prompt = ChatPrompt(messages, template_use=TemplateUse(chat_template_kwargs=variables), thinking_budget=5)
    processors = reader.process(0, prompt, SamplingParams()).sampling.logits_processors
    if opening is None:
        assert not processors
    else:
        assert processors == {"thinking_budget": [5, [marks[mark] for mark in opening], [marks["</think>"]], []]}


def test_call_ends_a_bounded_thought_where_tools_are_offered(tmp_path):
    reader = InputProcessor(write_tokenizer(tmp_path, "<tool_call></think>" + CHAT), required=True)
    tools = ToolUse(tools=[Tool("function", Function("add"))])
    prompt = ChatPrompt([{"role": "user", "content": "hi"}], tools, thinking_budget=5)
    *_, calls = reader.process(0, prompt, SamplingParams()).sampling.logits_processors["thinking_budget"]
    assert calls == [reader.tokenizer.added_tokens["<tool_call>"]]


def test_bound_of_thoughts_comes_before_other_processors(tmp_path):
    reader = InputProcessor(write_tokenizer(tmp_path, "<tool_call></think>" + CHAT), required=True)
    prompt = ChatPrompt([{"role": "user", "content": "hi"}], thinking_budget=5)
    sampling = SamplingParams(logits_processors={"mine": 1, "thinking_budget": [9, [], [3], []]})
    processors = reader.process(0, prompt, sampling).sampling.logits_processors
    assert [*processors] == ["thinking_budget", "mine"] and processors["thinking_budget"][0] == 5


def test_answer_that_goes_on_begins_with_its_own_space(sp_directory, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sp_directory / "tokenizer.model").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    reader = InputProcessor(tmp_path, required=True)
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "the quick"}]
    ids = reader.tokenizer.encode("the quick brown")[len(reader.tokenizer.encode("the quick")) :]
    for goes_on, text in ((True, " brown"), (None, "brown")):
        prompt = ChatPrompt(messages, template_use=TemplateUse(continue_final_message=goes_on))
        state = RequestState(reader.process(0, prompt, SamplingParams()), reader.tokenizer, streams=True)
        state.add(AnswerUpdate(index=0, token_ids=ids, finish_reason=FinishReason.LENGTH))
        assert (state.take_delta(0).text, state.output().completions[0].text) == (text, text)


def test_text_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "17 + 25"}, {"type": "text", "text": " = ?"}]
    messages = [{"role": "system", "content": "Be brief.", "own": 1}, {"role": "user", "content": parts}]
    for given in (messages, {"messages": messages}):
        prompt, _ = parse_prompt(given)
        assert prompt.messages == [messages[0], {"role": "user", "content": "17 + 25 = ?"}]
    assert messages[1]["content"] is parts


def test_arguments_of_a_past_call_become_an_object():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17}'}}
    prompt, _ = parse_prompt([{"role": "assistant", "tool_calls": [call], "own": 1}])
    function = {"name": "add", "arguments": {"a": 17}}
    expected = {"role": "assistant", "content": None, "tool_calls": [call | {"function": function}], "own": 1}
    assert prompt.messages == [expected]
    assert parse_prompt(prompt.messages)[0].messages == [expected]
    with pytest.raises(UserError, match="invalid message: Object missing required field `function`"):
        parse_prompt([{"role": "assistant", "tool_calls": [{"id": "c1"}]}])


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "content parts of type 'image_url' are not supported: models"),
        ({"type": "text"}, "Object missing required field `text`"),
        ("hi", "Expected `object`, got `str`"),
    ],
    ids=str,
)  # fmt: skip
def test_other_parts_of_a_message_are_refused(part, text):
    with pytest.raises(UserError) as caught:
        parse_prompt([{"role": "user", "content": [part]}])
    assert str(caught.value).startswith(f"invalid message: {text}")
