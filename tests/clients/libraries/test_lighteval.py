"""lighteval by the command of docs/evaluate.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from client_service import KEY, MODEL
from launchers import ROOT

pytest.importorskip("lighteval")


def test_generated_answers(url, tmp_path):
    model = f"model_name=openai/{MODEL},base_url={url}/v1,api_key={KEY},max_model_length=2048"
    flags = ["--custom-tasks", str(ROOT / "examples" / "lighteval_sums.py"), "--output-dir", str(tmp_path / "results")]
    command = [sys.executable, "-m", "lighteval", "endpoint", "litellm", model, "labinfer_sums|0", *flags]
    variables = os.environ | {"HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=250)
    if "tinyBenchmarks.pkl" in done.stdout + done.stderr:
        pytest.skip("at its first start lighteval fetches a file from GitHub")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["all"]["em"] > 0.9
