"""Scripts of benchmarks/ on a small model: each runs to its end and prints its table."""

from __future__ import annotations

import pytest
from launchers import ROOT, command, finish, start

pytestmark = pytest.mark.slow

SCRIPTS = {
    "batch_policies.py": ("mpirun", ["--requests", "3", "--prompt-tokens", "20", "60", "--rounds", "1"]),
    "cold_start.py": ("single", ["--rounds", "1"]),
    "gateway_overhead.py": ("single", ["--streams", "2", "--tokens", "8", "--rounds", "1"]),
    "idle_server.py": ("single", ["--pause", "2", "--rounds", "1"]),
    "layouts.py": ("single", ["--rounds", "1", "--layouts", "tp 2, mpirun", "pp 2, torchrun"]),
    "load_rate.py": ("mpirun", ["--rounds", "1", "--tensor-parallel-size", "2"]),
    "peak_memory.py": ("mpirun", ["--tensor-parallel-size", "2"]),
    "pipeline_schedules.py": ("torchrun", ["--requests", "4", "--output-tokens", "8", "--rounds", "1"]),
    "prefix_cache.py": ("single", ["--requests", "2", "--shared-tokens", "64", "--rounds", "1"]),
    "restart_pause.py": ("single", ["--deaths", "1", "--dtype", "float32"]),
    "watch_cost.py": ("single", ["--requests", "2", "--tokens", "8", "--pairs", "2"]),
    "workloads.py": ("single", ["--variants", "auto", "--rounds", "1"]),
}
"""Launcher and arguments beside the model; those that need none, or a mixture, are below."""
WITHOUT_MODEL = {
    "delta_rule.py": ["--rounds", "1", "--sequences", "32"],
    "experts.py": ["--rounds", "1", "--experts", "8", "--prompt", "64"],
    "kv_cache_dtype.py": ["--per-task", "1", "--output-tokens", "4"],
    "scheduler_cost.py": ["--steps", "4"],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("benchmarks") / "small"
    script = str(ROOT / "tools" / "random_checkpoint.py")
    finished = finish(start(command("single", 1, script, "--shape", "small", str(directory))), 120)
    assert finished.returncode == 0, finished.text
    return str(directory)


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_prints_its_table(small, script):
    launcher, arguments = SCRIPTS[script]
    check_table(launcher, script, "--model", small, *arguments)


@pytest.mark.parametrize("script", WITHOUT_MODEL)
def test_benchmark_without_a_model_prints_its_table(script):
    check_table("single", script, *WITHOUT_MODEL[script])


def check_table(launcher: str, script: str, *arguments: str) -> None:
    ranks = 1 if launcher == "single" else 2
    finished = finish(start(command(launcher, ranks, str(ROOT / "benchmarks" / script), *arguments)), 300)
    assert finished.returncode == 0, finished.text
    assert "---" in finished.stdout, finished.text
