"""What is asked of the command line alone is answered at once: nothing heavy is imported for it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from labinfer.cli.command_table import COMMANDS

QUESTIONS = {
    "help": ["--help"],
    "all help": ["--help-all"],
    "help as a word": ["help"],
    "help of a word": ["help", "serve"],
    "help of benchmarks": ["bench", "--help"],
    "help of plan": ["plan", "--help"],
    "help of chat": ["chat", "--help"],
    **{f"help of {command}": [*command.split(), "--help"] for command in COMMANDS if command.startswith("bench ")},
    "version": ["--version"],
    "packed weights on disk": ["cache"],
}
MISTAKES = {
    "unknown command": ["serves"],
    "unknown flag": ["--modle", "x"],
    "unknown flag of plan": ["plan", "--modle", "x"],
    "no number": ["--prompt", "x", "--max-num-seqs", "many"],
    "out of bounds": ["plan", "--max-num-seqs", "0"],
    "nothing to do": ["--model", "demo"],
    "no address": ["chat", "--url", "localhost:8000"],
    "wrong sampling of a chat": ["chat", "--temperature", "-1"],
    "wrong sampling": ["--prompt", "x", "--temperature", "-1"],
    "benchmark of no kind": ["bench"],
    "no such model": ["--prompt", "x", "--model", "./nowhere"],
    "no such model to serve": ["serve", "--model", "demo", "--model", "other=./nowhere"],
    "model without a config": ["--prompt", "x", "--model", "tests"],
    "no such input": ["--input", "nowhere.jsonl"],
    "no place for the output": ["--prompt", "x", "--output", "nowhere/out.jsonl"],
    "layout of more ranks": ["--prompt", "x", "-tp", "2"],
    "layout twice": ["--prompt", "x", "--layout", "auto", "-pp", "1"],
    "no such plan": ["--prompt", "x", "--layout", "nowhere.json"],
    "plan of what was not probed": ["plan", "--auto", "--cluster", "nowhere.json"],
    "address of another machine": ["serve", "--host", "203.0.113.1"],
    "chart of another kind": ["bench", "latency", "--plot", "chart.gif"],
    "no such requests of a benchmark": ["bench", "serve", "--dataset", "nowhere.jsonl"],
    "no such workload": ["bench", "throughput", "--workload", "nowhere.csv"],
    "no such file of keys": ["serve", "--port", "0", "--api-key-file", "nowhere"],
}
HEAVY = {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "mpi4py"}
WATCHED = """
import json, sys
from labinfer.cli.main import main

for arguments in json.loads(sys.argv.pop()):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    print("imported:", int(status or 0), *sys.modules, flush=True)
"""
MOST_BARE_STARTS = 16
"""Starts of the interpreter alone that take as long as a start that only answers a question, at most."""


def run_watched(*commands: list[str], **env: str) -> list[tuple[int, set[str]]]:
    """Exit status of each of these command lines, one after another in one process, and the modules that were imported by then."""
    arguments = [sys.executable, "-c", WATCHED, json.dumps(commands)]
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, **env})
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("imported: ")]
    assert len(lines) == len(commands), done.stderr
    return [(int(status), set(modules)) for status, *modules in lines]


@pytest.fixture(scope="module")
def watched() -> dict[str, tuple[int, set[str]]]:
    commands = QUESTIONS | MISTAKES
    return dict(zip(commands, run_watched(*commands.values()), strict=True))


@pytest.mark.parametrize("name", QUESTIONS)
def test_question_is_answered_without_heavy_imports(watched, name):
    status, modules = watched[name]
    assert status == 0
    assert "labinfer" in modules and not modules & HEAVY


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_command_line_is_refused_without_heavy_imports(watched, name):
    status, modules = watched[name]
    assert status == 2
    assert not modules & HEAVY


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_model_that_the_hub_does_not_have_is_refused_before_torch_is_imported(tmp_path, world_size):
    ranks = {"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": world_size}
    env = ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    [(status, modules)] = run_watched(["--prompt", "x", "--model", "nobody/nothing"], **env)
    assert status == 2 and "huggingface_hub" in modules and "torch" not in modules


def test_run_imports_nothing_that_it_has_no_use_for():
    [(status, modules)] = run_watched(["--prompt", "17 + 25 = ?", "--threads", "1"])
    assert status == 0 and "torch" in modules
    assert not modules & {"sympy", "matplotlib", "transformers", "starlette"}
    others = {
        "planner.objective",
        "requests.jsonl",
        "requests.openai",
        "weights.gguf.checkpoint",
        "weights.gguf.config",
    }
    assert not modules & {f"labinfer.{name}" for name in others}


@pytest.mark.timing
@pytest.mark.parametrize("arguments", [["--help"], ["--modle", "x"]], ids=["help", "unknown flag"])
def test_it_takes_little_time(arguments):
    """Beside what the interpreter takes to start, in turns with it: seconds also depend on the machine, and on who else is at
    work there. Of the processor, as time on the wall depends on them even more."""

    def seconds(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    turns = [(seconds("-m", "labinfer", *arguments), seconds("-c", "pass")) for _ in range(5)]
    command, bare = map(min, zip(*turns, strict=True))
    assert command / bare < MOST_BARE_STARTS


def test_package_is_found_from_the_folder_around_its_checkout(tmp_path):
    """A folder without ``__init__.py`` is a package, too, unless there is one on the path that has it."""
    (tmp_path / "labinfer").mkdir()
    code = "import labinfer; print(labinfer.__version__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
