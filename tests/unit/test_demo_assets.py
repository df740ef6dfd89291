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
from tokenizer import render

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
def test_the_shape_can_be_split(name):
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


def test_the_chat_template_is_what_training_rendered():
    from transformers import PreTrainedTokenizerFast

    ours, theirs = Tokenizer(DIRECTORIES["demo"]), PreTrainedTokenizerFast.from_pretrained(DIRECTORIES["demo"])
    rng = random.Random(8)
    for _ in range(50):
        messages = [{"role": "system", "content": SYSTEM}, *conversation(rng)]
        asked = ours.encode_chat(messages[:-1])
        assert asked == theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        trained = ours.encode(render(messages), add_special_tokens=False)
        assert trained[: len(asked)] == asked


TOKENIZER = Tokenizer(DIRECTORIES["demo"])


@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_the_model_card_has_figures_that_reach_the_goals():
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
