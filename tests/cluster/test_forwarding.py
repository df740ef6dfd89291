"""Ranks that forward commands to others, in real launches: the same tokens, also beside a spare rank, and one end for all."""

from __future__ import annotations

import json

import pytest
from golden import PROMPTS, golden
from launchers import matrix, run

FORWARDING = "tests/cluster/forwarding_launch.py"
NUM_TOKENS = 16


@pytest.fixture
def job(tmp_path) -> list[str]:
    lines = [
        {"id": number, "prompt_token_ids": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        for number, prompt in enumerate(PROMPTS)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--input", str(path), "--output", str(tmp_path / "out.jsonl")]


@pytest.mark.parametrize(
    ("launcher", "ranks", "layout"),
    matrix(
        ("mpirun", 4, ("-tp", "1,2,1")),
        over=[(4, ("-tp", "1,2,1")), (6, ("-tp", "2,2,1", "--ranks", "3,1,5,4,0"))],
    ),
)
def test_forwarded_plans_give_the_same_tokens(launcher, ranks, layout, model, job):
    done = run(launcher, ranks, FORWARDING, "--model", model, *job, *layout, "--max-num-seqs", "4")
    assert done.returncode == 0, done.text
    with open(job[-1]) as file:
        answers = {record["id"]: record["token_ids"] for record in map(json.loads, file)}
    assert answers == {number: tokens[:NUM_TOKENS] for number, tokens in enumerate(golden("qwen2-tied").tokens)}


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "fault"), matrix(over=[("kill",), ("hang",)]))
def test_rank_that_fails_ends_those_that_it_forwards_to(launcher, fault, model, job):
    """Rank 1 sends plans to ranks 3 and 4, and computes with rank 0."""
    env = {"FAULT": fault, "FAULT_RANK": "1", "FAULT_STEP": "4"}
    flags = ("--model", model, *job, "-tp", "2,1,1,1", "--timeout", "2")
    done = run(launcher, 5, FORWARDING, *flags, timeout=60, **env)
    assert done.returncode != 0
    if fault == "hang":
        assert "rank 1 (stage 0, tp 1): step 3, waiting for no other rank" in done.own_stderr, (
            "the culprit is not named"
        )
