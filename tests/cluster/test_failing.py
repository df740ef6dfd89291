"""When a rank fails, all end within seconds, with one account of why; when a person ends the run, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launchers import LAUNCH, Finished, command, descendants, finish, matrix, run, start
from process_tree import is_running, rank_number
from serving import wait_for

FAULTY = "tests/cluster/faulty_launch.py"
LIMIT_SECONDS = 10


@pytest.fixture
def job(tmp_path) -> list[str]:
    """A job that takes much longer than any of these tests."""
    lines = [{"id": i, "prompt_token_ids": [5 + i] * 20, "max_tokens": 60 + i, "ignore_eos": True} for i in range(400)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--input", str(path), "--output", str(tmp_path / "out.jsonl")]


def run_faulty(launcher, fault, ranks, rank, model, job, *flags) -> Finished:
    """A stage on each of ``ranks``; on ``rank`` the fault comes at step 4, and the seconds count from there."""
    time_file = Path(job[-1]).with_name("fault-time")
    env = {"FAULT": fault, "FAULT_RANK": str(rank), "FAULT_STEP": "4", "FAULT_TIME": str(time_file)}
    begin = time.time()
    done = run(launcher, ranks, FAULTY, "--model", model, *job, "-pp", ranks, *flags, timeout=60, **env)
    assert time_file.exists(), done.text
    return replace(done, seconds=begin + done.seconds - float(time_file.read_text()))


@pytest.mark.parametrize(("launcher", "rank"), matrix(("mpirun", 1), over=[(0,), (1,)]))
def test_uncaught_exception_ends_all_ranks(launcher, rank, model, job):
    done = run_faulty(launcher, "raise", 2, rank, model, job)
    assert done.returncode != 0
    assert done.seconds < LIMIT_SECONDS
    assert done.own_stderr.count("Traceback (most recent call last)") == 1
    assert done.own_stderr.count("RuntimeError: a fault put in by a test") == 1


@pytest.mark.parametrize(("launcher",), matrix(("torchrun",)))
def test_killed_rank_ends_all_ranks(launcher, model, job):
    done = run_faulty(launcher, "kill", 2, 1, model, job)
    assert done.returncode != 0
    assert done.seconds < LIMIT_SECONDS


@pytest.mark.parametrize(("launcher",), matrix(("mpirun",)))
def test_wait_that_takes_too_long_names_rank_stage_step_and_peer(launcher, model, job):
    done = run_faulty(launcher, "hang", 3, 1, model, job, "--timeout", "2")
    assert done.returncode != 0
    waits = [line for line in done.our_errors if "waited 2 s (step " in line]
    assert any("rank 2 (stage 2, tp 0)" in line and "from rank 1 (stage 1, tp 0)" in line for line in waits) or any(
        "rank 0 (stage 0, tp 0)" in line and "from rank 2 (stage 2, tp 0)" in line for line in waits
    ), done.text
    assert "rank 1 (stage 1, tp 0): step 3, waiting for no other rank" in done.own_stderr, "the culprit is not named"


@pytest.mark.parametrize(
    ("launcher", "fault"), matrix(("mpirun", "kill"), ("torchrun", "hang"), over=[("hang",), ("kill",)])
)
def test_tensor_parallel_rank_that_fails_ends_the_others_where_they_wait_for_its_sum(launcher, fault, model, job):
    env = {"FAULT": fault, "FAULT_RANK": "1", "FAULT_STEP": "4"}
    done = run(launcher, 2, FAULTY, "--model", model, *job, "-tp", "2", "--timeout", "2", timeout=60, **env)
    assert done.returncode != 0
    if fault == "hang":
        awaited = "rank 0 (stage 0, tp 0) waited 2 s (step 4) for the part of rank 1 (stage 0, tp 1) in the sum over"
        assert any(awaited in line for line in done.our_errors), done.text
        assert "rank 1 (stage 0, tp 1): step 3, waiting for no other rank" in done.own_stderr, (
            "the culprit is not named"
        )


@pytest.mark.parametrize(("launcher", "fault"), matrix(("mpirun", "hang"), over=[("hang",), ("kill",)]))
def test_rank_that_drafts_and_fails_ends_the_others_and_is_named(launcher, fault, model, job):
    speculation = json.dumps({"model": model, "num_speculative_tokens": 3, "draft_rank": 2})
    flags = ["-pp", "2", "--ranks", "0,1", "--speculative-config", speculation, "--timeout", "2"]
    env = {"FAULT": fault, "FAULT_RANK": "2", "FAULT_STEP": "4"}
    done = run(launcher, 3, FAULTY, "--model", model, *job, *flags, timeout=60, **env)
    assert done.returncode != 0
    if fault == "hang":
        assert any("waited 2 s" in line and "for the drafts from rank 2" in line for line in done.our_errors), done.text
        assert "rank 2 (drafts): before the first step, waiting for no other rank" in done.own_stderr, (
            "the culprit is not named"
        )
    else:
        assert "rank 2" in done.own_stderr, done.text


@pytest.mark.parametrize(
    ("launcher", "signum"),
    matrix(("mpirun", signal.SIGINT), over=[(signal.SIGINT,), (signal.SIGTERM,)]),
)
def test_signal_ends_the_run_with_what_was_finished_written(launcher, signum, model, job):
    """With a spare rank, too: rank 1 has no part of the model."""
    process = start(command(launcher, 3, LAUNCH, "--model", model, *job, "-pp", "2", "--ranks", "0,2"))
    out = job[-1]
    wait_for(lambda: os.path.exists(out) and os.path.getsize(out) > 2000, 60)
    tree = descendants(process.pid)
    begin = time.monotonic()
    os.killpg(process.pid, signum)  # as a terminal does
    done = finish(process, 30, begin)
    assert done.returncode != 0
    assert done.seconds < LIMIT_SECONDS
    assert done.stderr.count("interrupted") == done.stderr.count("interrupted; finished results are written") == 1
    with open(out) as file:
        records = [json.loads(line) for line in file]
    assert records
    assert all(len(record["token_ids"]) == 60 + record["id"] for record in records), (
        "a line holds an unfinished request"
    )
    assert f"{len(records)} finished" in done.stderr and f"results so far are in {out}\n" in done.stderr
    wait_for(lambda: not any(is_running(pid) for pid in tree), 5)


def signal_rank(process, rank: int, signum: int) -> None:
    os.kill(next(pid for pid in descendants(process.pid) if rank_number(pid) == rank), signum)


@pytest.mark.parametrize(
    ("launcher", "rank", "signum"),
    matrix(
        ("mpirun", 1, signal.SIGTERM),
        over=[(rank, signum) for rank in (0, 1) for signum in (signal.SIGINT, signal.SIGTERM)],
    ),
)
def test_signal_to_one_rank_ends_the_run_in_order_and_is_named(launcher, rank, signum, model, job):
    process = start(command(launcher, 3, LAUNCH, "--model", model, *job, "-pp", "3"))
    out = Path(job[-1])
    wait_for(lambda: out.exists() and out.stat().st_size > 2000, 60)
    begin = time.monotonic()
    signal_rank(process, rank, signum)
    done = finish(process, 30, begin)
    assert done.returncode == (128 + signum if launcher == "mpirun" else 1), done.text
    assert done.seconds < LIMIT_SECONDS
    assert done.stderr.count("interrupted") == done.stderr.count("interrupted; finished results are written") == 1
    assert (f"rank 1 on {socket.gethostname()} got {signum.name}; aborting" in done.stderr) == (rank == 1)
    assert "without a message" not in done.stderr and not done.our_errors
    assert all("token_ids" in json.loads(line) for line in out.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "rank"), matrix(over=[(0,), (1,)]))
def test_signal_to_one_rank_while_another_loads_is_named(launcher, rank, model, job, tmp_path):
    env = {"FAULT": "load", "FAULT_RANK": "2", "FAULT_TIME": str(tmp_path / "fault-time")}
    process = start(command(launcher, 3, FAULTY, "--model", model, *job, "-pp", "3"), **env)
    wait_for(lambda: (tmp_path / "fault-time").exists(), 60)
    begin = time.monotonic()
    signal_rank(process, rank, signal.SIGTERM)
    done = finish(process, 30, begin)
    assert done.returncode != 0
    assert done.seconds < LIMIT_SECONDS
    assert (f"rank 1 on {socket.gethostname()} got SIGTERM; aborting" in done.stderr) == (rank == 1), done.text
    assert "without a message" not in done.stderr


def test_ranks_die_with_their_launcher(model, job):
    process = start(command("mpirun", 2, LAUNCH, "--model", model, *job, "-pp", "2"))
    wait_for(lambda: os.path.exists(job[-1]) and os.path.getsize(job[-1]) > 0, 60)
    tree = descendants(process.pid)
    process.kill()
    wait_for(lambda: not any(is_running(pid) for pid in tree), LIMIT_SECONDS)
    process.communicate()


@pytest.mark.slow
def test_rank_whose_launcher_dies_while_it_imports_torch_ends(model, job):
    process = start(command("torchrun", 1, LAUNCH, "--model", model, *job))

    def importing() -> list[int]:
        ranks = [pid for pid in descendants(process.pid) if rank_number(pid) == 0]
        return [pid for pid in ranks if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]

    wait_for(importing, 60)
    (rank,) = importing()
    process.kill()
    wait_for(lambda: not is_running(rank), 3)
    process.communicate()
