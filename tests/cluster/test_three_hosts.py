"""Three hosts under a supervisor, and one of them that goes: for good, or until its cable is back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
from golden import PROMPTS, golden
from hosts import Hosts, needs_hosts
from launchers import LAUNCH, descendants, finish, kill_tree
from serving import is_running, wait_for

pytestmark = needs_hosts

NUM_LINES, NUM_TOKENS = 120, 32
GONE = 2
CLIENT = """
import json, sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:8000/ready")
        break
    except OSError:
        time.sleep(0.1)
body = {"prompt": "red blue", "max_tokens": 1200, "ignore_eos": True, "temperature": 1.0, "seed": 5, "stream": True}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
for line in urllib.request.urlopen(request):
    if line.startswith(b"data: {"):
        print(json.loads(line[6:])["choices"][0]["text"], end="", flush=True)
"""


@pytest.fixture
def hosts(tmp_path):
    with Hosts.made(3, tmp_path) as hosts:
        yield hosts


def make_job(model: str, tmp_path) -> list:
    """The flags of one that takes some seconds."""
    path = tmp_path / "in.jsonl"
    lines = [{"prompt_token_ids": PROMPTS[i % len(PROMPTS)], "max_tokens": NUM_TOKENS} for i in range(NUM_LINES)]
    path.write_text("".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines))
    flags = ["--max-num-seqs", 4, "--fault-timeout", 3]
    return ["--model", model, "--input", path, "--output", tmp_path / "out.jsonl", *flags]


def supervise(hosts: Hosts, *command, rejoin_timeout: float) -> subprocess.Popen:
    """One rank on each host."""
    flags = ["--rejoin-timeout", rejoin_timeout, "--", *hosts.mpirun(1), sys.executable, LAUNCH, *command]
    return hosts.start(0, [sys.executable, LAUNCH, "supervise", *flags])


def num_lines(tmp_path) -> int:
    out = tmp_path / "out.jsonl"
    return out.read_bytes().count(b"\n") if out.exists() else 0


def check_answers(tmp_path) -> None:
    """Every line is answered once, with the tokens that it always has."""
    records = {record["id"]: record["token_ids"] for record in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert num_lines(tmp_path) == len(records) == NUM_LINES
    tokens = golden("qwen2-tied").tokens
    assert all(ids == tokens[(number - 1) % len(PROMPTS)][:NUM_TOKENS] for number, ids in records.items())


def test_group_goes_on_without_a_host_that_stays_away(hosts, model, tmp_path):
    process = supervise(hosts, *make_job(model, tmp_path), "-pp", 3, "--layers", "1,1,2", rejoin_timeout=2)
    try:
        wait_for(lambda: num_lines(tmp_path) > 5, 60)
        tree = [process.pid, *descendants(process.pid)]
        hosts.switch_off(GONE)
        begin, before = time.monotonic(), num_lines(tmp_path)
        wait_for(lambda: num_lines(tmp_path) > before + 4, 40)
        print(f"on with two after {time.monotonic() - begin:.1f} s")
        done = finish(process, 60)
    finally:
        kill_tree(process)
    assert done.returncode == 0, done.text
    assert "no heartbeat from rank 2 on host-2 for 3 s" in done.our_errors[0]
    assert "no answer from 10.99.7.3; waiting up to 2 s (--rejoin-timeout) before restarting without it" in done.stderr
    assert "restarting without 10.99.7.3: 2 of 3 ranks, with -tp 1,1 -pp 2 --layers 2,2" in done.stderr
    check_answers(tmp_path)
    wait_for(lambda: not any(map(is_running, tree)), 2)


@pytest.mark.slow
def test_machines_that_are_left_plan_again(hosts, model, tmp_path):
    process = supervise(hosts, *make_job(model, tmp_path), "--layout", "auto", "--threads", 1, rejoin_timeout=2)
    try:
        wait_for(lambda: num_lines(tmp_path) > 5, 90)
        hosts.switch_off(GONE)
        done = finish(process, 90)
    finally:
        kill_tree(process)
    assert done.returncode == 0, done.text
    assert "restarting without 10.99.7.3: 2 of 3 ranks, with --layout auto" in done.stderr
    first, again = re.findall(r"--layout auto: (layers .*)", done.stderr)
    assert "host-2" not in again, first
    check_answers(tmp_path)


@pytest.mark.slow
def test_host_whose_cable_is_out_for_20_seconds_is_waited_for(hosts, model, tmp_path):
    process = supervise(hosts, *make_job(model, tmp_path), rejoin_timeout=60)
    try:
        wait_for(lambda: num_lines(tmp_path) > 5, 60)
        hosts.cable(GONE, "down")
        time.sleep(20)
        assert process.poll() is None
        hosts.cable(GONE, "up")
        begin, before = time.monotonic(), num_lines(tmp_path)
        wait_for(lambda: num_lines(tmp_path) > before + 4, 40)
        print(f"on {time.monotonic() - begin:.1f} s after the cable is back")
        done = finish(process, 60)
    finally:
        kill_tree(process)
    assert done.returncode == 0, done.text
    assert "no heartbeat from rank 2 on host-2 for 3 s" in done.our_errors[0]
    assert "10.99.7.3 answers again after" in done.stderr and "restarting without 10" not in done.stderr
    check_answers(tmp_path)


@pytest.mark.slow
def test_stream_goes_on_without_a_host_that_stays_away(hosts):
    flags = ("--dtype", "float32", "--no-autotune", "--fault-timeout", 3)
    process = supervise(hosts, "serve", *flags, rejoin_timeout=5)
    clients = []
    try:
        clients.append(hosts.start(0, [sys.executable, "-c", CLIENT]))
        undisturbed = finish(clients[-1], 90)
        clients.append(hosts.start(0, [sys.executable, "-c", CLIENT]))
        assert clients[-1].stdout.read(1)
        hosts.switch_off(GONE)
        begin = time.monotonic()
        rest = finish(clients[-1], 60, begin)
        print(f"the stream has ended {rest.seconds:.1f} s after the host")
        assert rest.returncode == 0 and len(rest.stdout) + 1 == len(undisturbed.stdout) > 0, rest.text
        assert undisturbed.stdout.endswith(rest.stdout)
        process.terminate()
        assert "restarting without 10.99.7.3" in finish(process, 30).stderr
    finally:
        for each in (process, *clients):
            kill_tree(each)
