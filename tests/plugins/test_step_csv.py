"""examples/plugins/step_csv.py: every step of every rank in CSV files, in a job, in a server and from Python."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from launchers import LAUNCH, ROOT, run
from serving import serving

PLUGIN = str(ROOT / "examples/plugins/step_csv.py")
NUM_TOKENS = 6


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def check(files: list[Path], stages: list[int], num_prompt_tokens: int) -> None:
    """All ranks ran the same steps; each stage's rows have its number and times."""
    tables = [rows_of(path) for path in files]
    for table, stage in zip(tables, stages, strict=True):
        assert {row["stage"] for row in table} == {str(stage)}
        assert all(float(row["busy_ms"]) > 0 and float(row["time"]) > 1.7e9 for row in table)
        assert any(float(row["waited_ms"]) > 0 for row in table) == (stage > 0)
    counts = [[(row["step_id"], row["num_tokens"], row["num_decodes"]) for row in table] for table in tables]
    assert all(other == counts[0] for other in counts)
    assert sum(int(row["num_tokens"]) for row in tables[0]) == num_prompt_tokens + NUM_TOKENS - 1


@pytest.mark.parametrize(
    ("launcher", "layout", "stages"),
    [
        pytest.param("single", (), [0], marks=pytest.mark.slow),
        pytest.param("torchrun", ("-tp", "2"), [0, 0], marks=pytest.mark.slow),
        ("mpirun", ("-pp", "2"), [0, 1]),
        pytest.param("torchrun", ("-pp", "2"), [0, 1], marks=pytest.mark.slow),
    ],
)
def test_job_writes_every_step_of_every_rank(launcher, layout, stages, tmp_path):
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps({"prompt_token_ids": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True}) + "\n")
    flags = ("--plugin", PLUGIN, "--step-sink", f"csv={tmp_path / 'steps'}", "--dtype", "float32")
    done = run(launcher, len(stages), LAUNCH, "--input", given, "--output", answers, *flags, *layout)
    assert done.returncode == 0, done.text
    check([tmp_path / f"steps-{rank}.csv" for rank in range(len(stages))], stages, num_prompt_tokens=3)


def test_server_writes_steps_as_they_run(tmp_path):
    flags = ("--plugin", PLUGIN, "--step-sink", f"csv={tmp_path / 'steps'}", "--dtype", "float32")
    with serving(*flags) as server:
        body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200
        check([tmp_path / "steps-0.csv"], [0], num_prompt_tokens=3)  # while it serves
        (plugin,) = server.get("/v1/cluster")[1]["plugins"]
        assert plugin.startswith("step_csv@") and len(plugin) == len("step_csv@") + 16


def test_sink_that_fails_is_turned_off(tmp_path):
    plugin = tmp_path / "broken_sink.py"
    plugin.write_text(
        "from labinfer import register\nfrom labinfer.worker.step_sink import StepSink\n\n"
        "@register('step_sink', 'broken')\nclass Broken(StepSink):\n    def write(self, step):\n        raise OSError('disk full')\n"
    )
    flags = ("--plugin", plugin, "--step-sink", "broken", "--prompt", "17 + 25 = ?")
    done = run("single", 1, LAUNCH, *flags)
    assert done.returncode == 0 and done.stdout.strip() == "42", done.text
    assert done.stderr.count("the step sink Broken failed at step 0 and is disabled: OSError('disk full')") == 1


def test_wrong_argument_of_a_sink_ends_the_start_in_one_line():
    folder = f"/no_such_folder_{os.getpid()}/steps"
    done = run("mpirun", 2, LAUNCH, "--plugin", PLUGIN, "--step-sink", f"csv={folder}", "--prompt", "x", "-pp", "2")
    assert done.returncode == 2
    assert done.our_errors == [
        f"labinfer: error: --step-sink csv={folder}: {folder}-0.csv cannot be written: No such file or directory"
    ]
