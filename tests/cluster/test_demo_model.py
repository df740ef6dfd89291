"""The bundled model in real launches: the default, on every kind of layout, evaluated, and installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import run

ROOT = Path(__file__).parents[2]
QUESTIONS = {
    "17 + 25 = ?": "42",
    "What is the capital of France?": "Paris",
    "法国的首都是哪里？": "巴黎",
    'Reverse "stone".': '"enots"',
}


@pytest.mark.parametrize(
    ("launcher", "ranks", "flags"),
    [
        ("mpirun", 3, ["-tp", "2,1", "-pp", "2"]),
        pytest.param("torchrun", 2, ["-pp", "2"], marks=pytest.mark.slow),
        pytest.param("mpirun", 2, ["-tp", "2"], marks=pytest.mark.slow),
        pytest.param("torchrun", 4, ["-tp", "2", "-pp", "2"], marks=pytest.mark.slow),
        pytest.param("mpirun", 4, ["-pp", "4"], marks=pytest.mark.slow),
    ],
)
def test_it_answers_on_every_layout(launcher, ranks, flags, launches, tmp_path):
    jobs, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": question, "messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    jobs.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    done = launches.run(launcher, ranks, "--input", jobs, "--output", out, *flags)
    assert done.returncode == 0, done.text
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {answer["id"]: answer["text"] for answer in answers} == QUESTIONS


def test_answer_that_is_cut_off_says_why(launches):
    prompts = [flag for text in ("17 + 25 = ?", "Hello", "a" * 40) for flag in ("--prompt", text)]
    done = launches.run("single", 1, *prompts, "--raw", "--ignore-eos", "--max-tokens", "40", "--max-model-len", "56")
    assert done.returncode == 0, done.text
    told = [line for line in done.text.splitlines() if "truncated" in line]
    assert told == [
        "labinfer: 2 outputs truncated: --max-tokens 40 reached",
        "labinfer: 1 output truncated: the context of 56 tokens is full",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("per_task", [100, 200])
def test_it_reaches_its_goals_through_both_engines(per_task):
    script = ROOT / "tools" / "demo_model" / "evaluate.py"
    done = run("single", 1, script, "--per-task", str(per_task), timeout=500)
    assert done.returncode == 0, done.text
    if per_task == 200:  # the model card's own figures
        card = (ROOT / "labinfer" / "assets" / "demo" / "README.md").read_text(encoding="utf-8")
        assert done.stdout.strip() in card


def test_installed_package_answers_with_the_bundled_model_where_none_is_given(tmp_path):
    """What setuptools would install, run from elsewhere."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "labinfer", source / "labinfer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = ["-c", "import setuptools; setuptools.setup()", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run([sys.executable, *build], cwd=source, check=True, capture_output=True, text=True, timeout=120)
    shutil.rmtree(source)
    done = subprocess.run(
        [sys.executable, "-m", "labinfer", "--prompt", "17 + 25 = ?", "--log-level", "info"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "lib"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert "model demo" in done.stderr
    assert str(tmp_path / "lib" / "labinfer" / "assets" / "demo") in done.stderr
