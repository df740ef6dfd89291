"""Rope of type ``dynamic`` on several ranks: greedy tokens are those of Transformers' ``generate``."""

from __future__ import annotations

import json

import pytest
from checkpoints import mixed_prompts, transformers_greedy
from dynamic_rope import make_dynamic
from launchers import matrix

PROMPTS = mixed_prompts(6)
NUM_TOKENS = 12
LAYOUTS = {"pp 2": ("-pp", "2"), "tp 2": ("-tp", "2")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_dynamic(tmp_path_factory.mktemp("dynamic"))


@pytest.mark.parametrize(
    ("launcher", "layout"), matrix(("mpirun", "tp 2"), ("torchrun", "pp 2"), over=[(name,) for name in LAYOUTS])
)
def test_tokens_on_several_ranks_are_those_of_transformers(checkpoint, launches, tmp_path, launcher, layout):
    expected = [transformers_greedy(checkpoint, [prompt], NUM_TOKENS)[0]["token_ids"] for prompt in PROMPTS]
    asked = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    lines = [{"id": str(number), "prompt_token_ids": prompt} | asked for number, prompt in enumerate(PROMPTS)]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    flags = ("--dtype", "float32", "--chunked-prefill-size", "7", "--block-size", "4")
    done = launches.run(
        launcher, 2, "--model", checkpoint, "--input", source, "--output", out, *flags, *LAYOUTS[layout]
    )
    assert done.returncode == 0, done.text
    records = {record["id"]: record["token_ids"] for record in map(json.loads, out.read_text().splitlines())}
    assert [records[str(number)] for number in range(len(PROMPTS))] == expected
