"""Benchmarks that cannot run, or cannot write what they are to: refused in one line before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from launchers import Finished
from waiting_ranks import run_in_turn

USAGE = 2
DEMO = str(Path(__file__).parents[2] / "labinfer/assets/demo")
TOO_LONG = "prompts and answers that are too long"
"""For what the KV cache holds, which is known when the model is loaded."""
REFUSED = {
    TOO_LONG: (
        ["latency", "--input-len", "4000", "--num-iters", "1"],
        "--input-len 4000 and --output-len 128 make 4128 tokens",
    ),
    "figures in no directory": (["serve", "--output-json", "{folder}/missing/figures.json"], "--output-json"),
    "chart in no directory": (
        ["throughput", "-pp", "2", "--plot", "{folder}/missing/chart.png"],
        "cannot write --plot {folder}/missing/chart.png: No such file or directory; directory {folder}/missing does not exist",
    ),
    "chart of another kind": (
        ["throughput", "-pp", "2", "--plot", "{folder}/chart.gif"],
        "the file name must end in .png, .pdf, .svg",
    ),
    "roofline in no directory": (["functions", "--plot", "{folder}/missing/roofline.svg"], "cannot write --plot"),
    "no text": (["accuracy", "--text", "none.txt"], "cannot read --text none.txt"),
    "a dtype that is none": (
        ["accuracy", "--reference-dtype", "int8"],
        "--reference-dtype int8: choose one of float32, bfloat16, float16",
    ),
    "another model": (["accuracy", "--model", DEMO], "needs --text FILE"),
    "a context without room": (["accuracy", "--max-model-len", "1"], "--max-model-len 1 leaves no token to predict"),
}
CHARTS = ("latency", "functions")


def test_what_cannot_be_measured_or_written_is_refused_on_all_ranks(launches, tmp_path):
    pytest.importorskip("matplotlib")
    for name, (flags, complaint) in REFUSED.items():
        done = launches.run("mpirun", 2, "bench", *(flag.format(folder=tmp_path) for flag in flags))
        check_refusal(done, complaint.format(folder=tmp_path))
        assert "KV cache" not in done.text or name == TOO_LONG


def check_refusal(done: Finished, complaint: str) -> None:
    assert done.returncode == USAGE, done.text
    assert len(done.our_errors) == 1 and complaint in done.our_errors[0], done.text


def test_chart_without_matplotlib_is_refused(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("import sys\n\nsys.modules['matplotlib'] = None\n")
    file = tmp_path / "chart.png"
    cases = {kind: ["bench", kind, "--plot", str(file)] for kind in CHARTS}
    ended = run_in_turn("single", 1, cases, tmp_path, PYTHONPATH=str(tmp_path / "hidden"))
    for done in ended.values():
        check_refusal(done, "labinfer: error: --plot needs matplotlib; run pip install matplotlib")
        assert "KV cache" not in done.text and "roofline limits" not in done.text
    assert not file.exists()
