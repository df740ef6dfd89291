"""Jobs that go on after they were killed: one output line for each input line, as an undisturbed run has them."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from launchers import LAUNCH, command, descendants, finish, kill_tree, matrix, run, start
from serving import is_running, wait_for

FLAGS = ("--max-num-seqs", "4", "--num-kv-blocks", "200", "--dtype", "float32")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Input lines of a few seconds, two of them wrong."""
    draw = random.Random(1)
    lines = [
        {"prompt_token_ids": [draw.randrange(5, 500) for _ in range(20)], "max_tokens": 20 + i, "ignore_eos": True}
        | ({"temperature": 1.0, "seed": i} if i % 2 else {})
        for i in range(40)
    ]
    lines[7], lines[30] = {"prompt": ""}, {"prompt": "x", "max_tokens": -1}
    path = tmp_path_factory.mktemp("resume") / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def undisturbed(work, model, launches) -> dict:
    out = work.with_name("undisturbed.jsonl")
    done = launches.run("single", 1, "--model", model, "--input", work, "--output", out, *FLAGS)
    assert done.returncode == 1, done.text  # two lines are wrong
    return read(out)


def read(out: Path) -> dict:
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = {record["id"]: record for record in records}
    assert len(found) == len(records), "a line was answered twice"
    return found


def kill_within(launcher: str, ranks: int, arguments: list, num_lines: int, seconds: float, out: Path) -> bool:
    """Kill all of a job some seconds after it has written so many lines. Returns whether it was still running."""
    before = out.read_bytes().count(b"\n") if out.exists() else 0
    process = start(command(launcher, ranks, LAUNCH, *arguments))
    limit = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < limit:
        if out.exists() and out.read_bytes().count(b"\n") >= before + num_lines:
            time.sleep(seconds)
            break
        time.sleep(0.01)
    was_running, tree = process.poll() is None, [process.pid, *descendants(process.pid)]
    kill_tree(process)
    finish(process, 30)
    wait_for(lambda: not any(map(is_running, tree)), 5)  # until then a rank may hold the output's lock
    return was_running


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_killed_job_goes_on_with_another_layout(launcher, model, work, undisturbed, launches, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--model", model, "--input", work, "--output", out, *FLAGS]
    assert kill_within(launcher, 2, [*flags, "-pp", "2"], 5, 0.1, out)
    refused = launches.run("single", 1, *flags)
    assert refused.returncode == 2 and "--resume continues it" in refused.our_errors[0]
    refused = launches.run("single", 1, *flags, "--resume", "--seed", "1")
    assert refused.returncode == 2 and "other options: --seed was 0 and is 1" in refused.our_errors[0]
    done = launches.run(launcher, 2, *flags, "-tp", "2", "--resume", "--progress", "jsonl")
    assert done.returncode == 1 and "2 of 40 lines failed" in done.stderr, done.text
    assert "lines are already done" in done.stderr
    last = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"lines_done"')][-1]
    assert (last["lines_done"], last["lines"], last["running"]) == (40, 40, 0)
    assert read(out) == undisturbed
    nothing = launches.run("single", 1, *flags, "--resume")
    assert "labinfer: nothing to do: all 40 lines are already done" in nothing.stderr, nothing.text
    assert nothing.returncode == 1 and "wall time" not in nothing.stderr
    again = launches.run("single", 1, *flags, "--retry-errors")
    assert again.returncode == 1 and "2 of 40 lines failed" in again.stderr, again.text
    assert read(out) == undisturbed


@pytest.mark.slow
def test_fifty_kills_lose_and_double_nothing(model, work, undisturbed, tmp_path):
    out = tmp_path / "out.jsonl"
    draw, kills, flags = random.Random(2), 0, ["--model", model, "--input", work, "--output", out, *FLAGS]
    while kills < 50:
        if not kill_within("single", 1, [*flags, "--resume"], draw.randrange(0, 4), 0.2 * draw.random(), out):
            assert read(out) == undisturbed
            out.unlink()
            out.with_name("out.jsonl.journal").unlink()
        kills += 1
    run("single", 1, LAUNCH, *flags, "--resume")
    assert read(out) == undisturbed


def test_custom_id_that_comes_twice_is_an_error_line(model, launches, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": [5, 6], "max_tokens": 2}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in "aba"]
    source.write_text("\n".join(map(json.dumps, lines)))
    done = launches.run("single", 1, "--model", model, "--input", source, "--output", out)
    assert done.returncode == 1, done.text
    found = [json.loads(line) for line in out.read_text().splitlines()]
    statuses = sorted((record["custom_id"], record["response"]["status_code"]) for record in found)
    assert statuses == [("a", 200), ("a", 400), ("b", 200)]
    assert any("line 3: custom_id is a duplicate of line 1" in json.dumps(record) for record in found)
