"""Step-3.5 over three ranks: Transformers' greedy tokens. The golden tests have no causal model of Transformers for it."""

from __future__ import annotations

import json

import pytest
from checkpoints import make_checkpoint, transformers_greedy
from golden import PROMPTS
from launchers import command, finish, start
from transformers import AutoModelForImageTextToText

SOME = PROMPTS[1:4]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Checkpoint, and Transformers' greedy tokens."""
    directory = make_checkpoint(tmp_path_factory.mktemp("step"), "step3-pictures")
    answers = transformers_greedy(directory, SOME, 16, AutoModelForImageTextToText)
    return directory, [answer["token_ids"] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("-tp", "3"), ("-pp", "3"), ("-tp", "2,1"), ("-tp", "3", "--experts", "whole")], ids=str
)
def test_every_layout_gives_the_tokens_of_transformers(layout, reference, tmp_path):
    directory, tokens = reference
    lines = [json.dumps({"prompt_token_ids": prompt, "max_tokens": 16, "ignore_eos": True}) for prompt in SOME]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = ["--model", str(directory), "--input", str(tmp_path / "in.jsonl"), *layout]
    done = finish(start(command("mpirun", 3, "launch.py", *arguments, "--output", str(tmp_path / "out.jsonl"))), 120)
    assert done.returncode == 0, done.text
    outputs = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert sorted(output["token_ids"] for output in outputs) == sorted(tokens)
