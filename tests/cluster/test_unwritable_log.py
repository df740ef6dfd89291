"""Launches whose standard error cannot be written: the log is lost, and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import urllib.error
import urllib.request

import pytest
from launchers import LAUNCH, ROOT, command, environment, free_port, kill_tree
from serving import Server, wait_for

NUM_LINES = 4
SUPERVISE = [*command("single", 1, LAUNCH, "supervise"), "--"]
LOGS = {"full": "2>/dev/full", "closed": "2>&-", "all closed": "<&- >&- 2>&-", "reader gone": "2>&1 | head -1"}


@pytest.mark.parametrize(
    ("starter", "log"),
    [
        ("single", "closed"),
        ("torchrun", "reader gone"),
        ("supervised mpirun", "full"),
        *[
            pytest.param(starter, log, marks=pytest.mark.slow)
            for starter in ("single", "torchrun", "supervised mpirun", "supervised torchrun")
            for log in LOGS
            if (starter, log) not in {("single", "closed"), ("torchrun", "reader gone"), ("supervised mpirun", "full")}
        ],
    ],
)
def test_job_ends_in_order_without_its_log(starter, log, model, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": "red", "max_tokens": 2}) + "\n" for i in range(NUM_LINES)))
    supervisor, launcher = SUPERVISE if "supervised" in starter else [], starter.split()[-1]
    ranks = 1 if launcher == "single" else 2
    flags = ["--model", model, "--input", path, "--output", out, "-pp", str(ranks)]
    words = [*supervisor, *command(launcher, ranks, LAUNCH, *flags)]
    line = f"{shlex.join(words)} {LOGS[log]}"
    done = subprocess.Popen(["bash", "-o", "pipefail", "-c", line], cwd=ROOT, env=environment(), start_new_session=True)
    try:
        assert done.wait(120) == 0
    finally:
        kill_tree(done)
    assert sorted(json.loads(text)["id"] for text in out.read_text().splitlines()) == list(range(NUM_LINES))


@pytest.mark.parametrize("closed", [">&-", pytest.param(">/dev/full", marks=pytest.mark.slow)])
def test_results_that_cannot_be_written_are_an_error(closed, model):
    line = (
        f"{shlex.join(command('single', 1, LAUNCH, '--model', model, '--prompt', 'red', '--max-tokens', '2'))} {closed}"
    )
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "labinfer: error: cannot write standard output" in done.stderr


@pytest.mark.slow
def test_supervised_server_whose_log_disk_is_full_starts_its_ranks_again():
    port = free_port()
    ranks = command("mpirun", 2, LAUNCH, "serve", "--port", str(port), "-pp", "2", "--no-autotune")
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*SUPERVISE, *ranks], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=full, stderr=full,
            start_new_session=True,
        )  # fmt: skip
    server = Server(process, f"http://127.0.0.1:{port}", log=None)

    def is_ready() -> bool:
        try:
            return urllib.request.urlopen(f"{server.url}/ready", timeout=5).status == 200
        except (urllib.error.URLError, OSError):
            return False

    try:
        wait_for(is_ready, 90)
        answer = server.complete(temperature=0).body["choices"]
        first = server.rank_pid(1)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not is_ready(), 30)
        wait_for(is_ready, 90)
        assert server.rank_pid(1) != first
        assert server.complete(temperature=0).body["choices"] == answer
        assert server.stop() == 128 + signal.SIGTERM
    finally:
        kill_tree(process)
