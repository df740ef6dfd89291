"""Tokens of prompts in lines of a job, by the tokenizer of the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import labinfer
from labinfer.base.errors import UserError
from labinfer.cli.commands.prompt_lengths import PromptLengths
from labinfer.planner.workload import read_workload
from labinfer.text.tokenizer import Tokenizer

DEMO = Path(labinfer.__file__).parent / "assets" / "demo"
TEXT = "17 + 25 = ?"
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": TEXT, "max_tokens": 9}}


def test_prompts_of_a_job_have_the_lengths_of_their_tokens(tmp_path):
    chat = [{"role": "user", "content": TEXT}]
    lines = [{"prompt": TEXT}, {"prompt_token_ids": [1, 2, 3]}, {"messages": chat, "max_tokens": 5}, BATCH]
    path = tmp_path / "job.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    plain, ids, turn, batch = read_workload(str(path), count_tokens=PromptLengths(DEMO)).requests
    length = len(Tokenizer(DEMO).encode(TEXT))
    assert plain.prompt == batch.prompt == length and ids.prompt == 3 and turn.prompt > length
    assert (turn.output, batch.output) == (5, 9)


def test_line_that_is_no_request_is_refused_by_its_number(tmp_path):
    path = tmp_path / "job.jsonl"
    path.write_text(f"{json.dumps({'prompt': TEXT})}\n{json.dumps({'prompt': TEXT, 'temprature': 1})}\n")
    with pytest.raises(UserError, match="job.jsonl:2: .*temprature"):
        read_workload(str(path), count_tokens=PromptLengths(DEMO))
