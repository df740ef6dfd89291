"""lm-eval by the commands of docs/evaluate.md: a task that generates, over chats and over completions with the checkpoint's tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from client_service import DEMO, KEY, MODEL
from launchers import ROOT

pytest.importorskip("lm_eval")


def score(directory: Path, *flags: str) -> float:
    variables = os.environ | {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    task = ["--tasks", "labinfer_sums", "--include_path", "examples/lm_eval", "--output_path", str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *task, *flags],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = directory.rglob("results*.json")
    return json.loads(results.read_text())["results"]["labinfer_sums"]["exact_match,none"]


def test_chat(url, tmp_path):
    arguments = f"model={MODEL},base_url={url}/v1/chat/completions,num_concurrent=4,tokenizer_backend=none"
    assert (
        score(tmp_path, "--model", "local-chat-completions", "--apply_chat_template", "--model_args", arguments) > 0.9
    )


def test_completions(url, tmp_path):
    arguments = f"model={MODEL},base_url={url}/v1/completions,num_concurrent=4,tokenizer={DEMO}"
    assert score(tmp_path, "--model", "local-completions", "--apply_chat_template", "--model_args", arguments) > 0.9
