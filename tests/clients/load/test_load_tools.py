"""guidellm, aiperf and vLLM's ``vllm bench serve``: a short load each, after which every request has its answer and its times."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from client_service import DEMO, KEY, MODEL

NUM_REQUESTS = 8


def run(tool: str, *arguments: str, directory: Path, **variables: str) -> None:
    """A program of this environment, or of another that is on the path."""
    program = shutil.which(Path(sys.executable).with_name(tool)) or shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed")
    variables = os.environ | {"OPENAI_API_KEY": KEY} | variables
    done = subprocess.run(
        [program, *arguments], cwd=directory, env=variables, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_guidellm(url, tmp_path):
    report = tmp_path / "report.json"
    flags = {
        "--backend": f"kind=openai_http,target={url},model={MODEL},api_key={KEY}",
        "--profile": "kind=concurrent,streams=2",
        "--tokenizer": f"kind=huggingface_auto,model={DEMO}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--output": f"kind=json,path={report}",
    }
    run("guidellm", "run", *(word for flag in flags.items() for word in flag), directory=tmp_path, HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) >= NUM_REQUESTS and not requests["errored"]


def test_aiperf(url, tmp_path):
    """It reads a folder as a tokenizer only without HF_HUB_OFFLINE."""
    flags = ["--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(DEMO)]
    flags += ["--api-key", KEY, "--concurrency", "2", "--request-count", str(NUM_REQUESTS), "--ui", "none"]
    flags += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8", "--artifact-dir", str(tmp_path)]
    run("aiperf", "profile", *flags, directory=tmp_path)
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == NUM_REQUESTS


@pytest.mark.parametrize("backend, route", [("openai", "completions"), ("openai-chat", "chat/completions")])
def test_vllm_bench(url, tmp_path, backend, route):
    flags = ["--backend", backend, "--base-url", url, "--endpoint", f"/v1/{route}", "--model", MODEL]
    flags += [
        "--tokenizer",
        str(DEMO),
        "--dataset-name",
        "random",
        "--random-input-len",
        "32",
        "--random-output-len",
        "8",
    ]
    flags += ["--num-prompts", str(NUM_REQUESTS), "--ignore-eos", "--save-result", "--result-filename", "report.json"]
    run("vllm", "bench", "serve", *flags, directory=tmp_path, HF_HUB_OFFLINE="1")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["total_output_tokens"]) == (NUM_REQUESTS, 8 * NUM_REQUESTS)
    assert report["mean_ttft_ms"] > 0 and report["mean_tpot_ms"] > 0
