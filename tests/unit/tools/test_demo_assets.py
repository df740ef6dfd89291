"""The bundled models: sizes, shapes, and one text as three programs tokenize it."""

from __future__ import annotations

import json
import random
import re

import pytest
from dialogues import SYSTEM, conversation
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tasks import TASKS
from tokenizer import CHAT_TEMPLATE, IM_END, IM_START, render

from labinfer.requests.recommended_sampling import recommended_sampling
from labinfer.text.chat_template import ChatTemplate
from labinfer.text.reply_format import load_built_in
from labinfer.text.reply_parts import join_events
from labinfer.text.tokenizer import Tokenizer
from labinfer.weights.resolve import BUNDLED, resolve_model

DIRECTORIES = {name: resolve_model(name, "", may_download=False) for name in BUNDLED}
LARGEST = {"demo": 14_000_000, "demo-draft": 2_000_000}


def config(name: str) -> dict:
    return json.loads((DIRECTORIES[name] / "config.json").read_text())


@pytest.mark.parametrize("name", BUNDLED)
def test_weights_are_small_and_in_bfloat16(name):
    path = DIRECTORIES[name] / "model.safetensors"
    assert path.stat().st_size <= LARGEST[name]
    with safe_open(path, "numpy") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118 - not a dict


@pytest.mark.parametrize("name", BUNDLED)
def test_shape_can_be_split(name):
    shape = config(name)
    assert shape["num_key_value_heads"] == 2 < shape["num_attention_heads"]
    assert shape["max_position_embeddings"] == 2048
    assert shape["dtype"] == "bfloat16"
    assert name != "demo" or shape["num_hidden_layers"] >= 6


def test_both_have_the_same_tokenizer_and_vocabulary():
    files = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for file in files:
        assert (DIRECTORIES["demo"] / file).read_bytes() == (DIRECTORIES["demo-draft"] / file).read_bytes()
    assert config("demo")["vocab_size"] == config("demo-draft")["vocab_size"]
    assert len(Tokenizer(DIRECTORIES["demo"]).encode("你好，世界")) <= 5


@pytest.mark.parametrize("name", BUNDLED)
def test_recommended_sampling_keeps_to_likely_tokens(name):
    assert recommended_sampling(DIRECTORIES[name]) == {"temperature": 0.3, "top_k": 20, "top_p": 0.5}


def test_chat_template_is_what_training_rendered():
    from transformers import PreTrainedTokenizerFast

    ours, theirs = Tokenizer(DIRECTORIES["demo"]), PreTrainedTokenizerFast.from_pretrained(DIRECTORIES["demo"])
    rng = random.Random(8)
    for _ in range(50):
        messages = [{"role": "system", "content": SYSTEM}, *conversation(rng)]
        asked = ours.encode_chat(messages[:-1])
        assert asked == theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        trained = ours.encode(render(messages), add_special_tokens=False)
        assert trained[: len(asked)] == asked


@pytest.mark.parametrize("name", BUNDLED)
def test_auto_tokenizer_reads_texts_as_we_do(name):
    """Evaluations load it so; by the model's type it would be Qwen2's, which splits texts in another way."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer(DIRECTORIES[name]), AutoTokenizer.from_pretrained(DIRECTORIES[name])
    for text in (
        "17 + 25 = ?",
        'Reverse "blue": eulb',
        "你好，世界",
        "a  b\n\n c1234",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert theirs.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "17 + 25 = ?"}]
    asked = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == asked


OLD_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As it was before it knew of tools, and as the models were trained."""
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]


@given(
    st.lists(st.builds(dict, role=st.sampled_from(["system", "user", "assistant"]) | st.just("x"), content=st.text()))
)
def test_without_tools_the_chat_template_renders_what_it_always_did(messages):
    assert ChatTemplate(CHAT_TEMPLATE, {}).render(messages) == ChatTemplate(OLD_TEMPLATE, {}).render(messages)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["no system", "system"])
def test_chat_template_lists_tools_in_one_system_message(system):
    text = ChatTemplate(CHAT_TEMPLATE, {}).render([*system, {"role": "user", "content": "hi"}], TOOLS)
    first, *rest = text.removeprefix(IM_START).split(f"{IM_END}\n{IM_START}")
    assert first.startswith("system\nBe brief.\n\n" if system else "system\n")
    assert first.split("<tools>\n")[1].split("</tools>")[0] == "".join(json.dumps(tool) + "\n" for tool in TOOLS)
    assert rest == ["user\nhi", "assistant\n"]


@pytest.mark.parametrize("content", [None, "", "Let me look."])
def test_chat_template_writes_calls_as_they_are_read(content):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "京都"}}}
    answers = [{"role": "tool", "content": "20 C"}, {"role": "tool", "content": "10:00"}]
    asked = {"role": "assistant", "content": content, "tool_calls": [call, call]}
    text = ChatTemplate(CHAT_TEMPLATE, {}).render([{"role": "user", "content": "hi"}, asked, *answers], TOOLS)
    _, _, assistant, results, end = text.split(IM_START)[1:]
    parser = load_built_in("hermes").parser("", TOOLS, parallel=True)
    text = assistant.removeprefix("assistant").removesuffix(f"{IM_END}\n").removeprefix("\n")
    reply = join_events(parser.feed(text) + parser.finish())
    assert reply.content == (content or "")
    assert [(one.name, one.arguments) for one in reply.calls] == [("weather", '{"city": "京都"}')] * 2
    responses = "".join(f"\n<tool_response>\n{answer['content']}\n</tool_response>" for answer in answers)
    assert (results, end) == (f"user{responses}{IM_END}\n", "assistant\n")


def test_models_carry_the_template_that_is_generated():
    config = json.loads((DIRECTORIES["demo"] / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE


TOKENIZER = Tokenizer(DIRECTORIES["demo"])


@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_model_card_has_figures_that_reach_the_goals():
    card = (DIRECTORIES["demo"] / "README.md").read_text(encoding="utf-8")
    figures = card.split("<!-- figures: written by evaluate.py -->")[1].split("<!-- end of figures -->")[0]
    shares = dict(re.findall(r"^\| (\w+) \| \d+ \| ([\d.]+) %", figures, re.M))
    assert float(shares.pop("all")) >= 95 and set(shares) == {*TASKS, "recall"}
    assert min(map(float, shares.values())) >= 85
    assert "Answers that differ between the two engines in fp32: 0 of" in figures


@pytest.mark.parametrize("name", BUNDLED)
def test_nothing_else_is_shipped_and_all_can_read_it(name):
    files = {path.name: path.stat().st_mode & 0o044 for path in DIRECTORIES[name].iterdir()}
    assert files == dict.fromkeys(
        (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "README.md",
        ),
        0o044,
    )
