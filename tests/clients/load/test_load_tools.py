"""guidellm and aiperf: a short load each, after which every request has its answer and its times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from client_service import DEMO, KEY, MODEL

NUM_REQUESTS = 8


def run(tool: str, *arguments: str, directory: Path) -> None:
    program = Path(sys.executable).with_name(tool)
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        [str(program), *arguments], cwd=directory, env=variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.skipif(find_spec("guidellm") is None, reason="guidellm is not installed")
def test_guidellm(url, tmp_path):
    backend = f"kind=openai_http,target={url},model={MODEL},api_key={KEY}"
    flags = [
        "--backend",
        backend,
        "--profile",
        "kind=concurrent,streams=2",
        "--tokenizer",
        f"kind=huggingface_auto,model={DEMO}",
    ]
    flags += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--output", str(tmp_path / "report.json")]
    run("guidellm", "run", *flags, "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", directory=tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) >= NUM_REQUESTS and not requests["errored"]


@pytest.mark.skipif(find_spec("aiperf") is None, reason="aiperf is not installed")
def test_aiperf(url, tmp_path):
    flags = ["--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(DEMO)]
    flags += ["--api-key", KEY, "--concurrency", "2", "--request-count", str(NUM_REQUESTS), "--ui", "none"]
    flags += [
        "--synthetic-input-tokens-mean",
        "32",
        "--output-tokens-mean",
        "8",
        "--output-artifact-dir",
        str(tmp_path),
    ]
    run("aiperf", "profile", *flags, directory=tmp_path)
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == NUM_REQUESTS
