"""Two hosts and a cable: how their ranks meet, and how both sides end when one dies or the cable is out."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
from golden import PROMPTS, golden
from hosts import Hosts, needs_hosts
from launchers import LAUNCH, descendants, finish, kill_tree
from serving import is_running, wait_for

pytestmark = needs_hosts


@pytest.fixture
def hosts(tmp_path):
    with Hosts.made(2, tmp_path) as hosts:
        yield hosts


@pytest.fixture
def job(model, tmp_path) -> list:
    """The flags of one that takes longer than any of these tests."""
    lines = [{"id": i, "prompt_token_ids": [5 + i] * 20, "max_tokens": 100, "ignore_eos": True} for i in range(300)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--model", model, "--input", path, "--output", tmp_path / "out.jsonl"]


def wait_for_lines(job: list) -> None:
    wait_for(lambda: job[-1].exists() and job[-1].stat().st_size > 0, 60)


def test_pipeline_between_hosts_and_tensor_parallel_inside(hosts, model, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": i, "prompt_token_ids": ids, "max_tokens": 32, "ignore_eos": True} for i, ids in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    agents = hosts.torchrun(2, "--model", model, "--input", path, "--output", out, "-tp", "2", "-pp", "2")
    done = [finish(agent, 90) for agent in agents]
    assert [d.returncode for d in done] == [0, 0], done[0].text + done[1].text
    records = {record["id"]: record["token_ids"] for record in map(json.loads, out.read_text().splitlines())}
    assert records == {index: answer[:32] for index, answer in enumerate(golden("qwen2-tied").tokens)}
    assert [line.split()[1] for line in done[0].stderr.splitlines() if line.strip()[:1].isdigit()][:4] == [
        "host-0"
    ] * 2 + ["host-1"] * 2


@pytest.mark.slow  # two names on one host are refused in the same way, in test_bad_input.py
def test_tp_group_over_both_hosts_is_refused_by_name(hosts, model):
    agents = hosts.torchrun(1, "--model", model, "--prompt", "x", "-tp", "2")
    done = [finish(agent, 60) for agent in agents]
    assert all(d.returncode != 0 for d in done)
    assert len(done[0].our_errors) == 1
    assert "rank 0 on host-0, rank 1 on host-1" in done[0].our_errors[0]


def test_host_that_dies_ends_the_run_on_the_other(hosts, job):
    agents = hosts.torchrun(1, *job, "-pp", "2")
    wait_for_lines(job)
    begin = time.monotonic()
    for pid in [agents[1].pid, *descendants(agents[1].pid)]:
        os.kill(pid, signal.SIGKILL)
    done = finish(agents[0], 30, begin)
    finish(agents[1], 5)
    assert done.returncode != 0
    assert done.seconds < 10
    assert all("token_ids" in json.loads(line) for line in job[-1].read_text().splitlines())


@pytest.mark.slow
def test_group_goes_on_when_the_agent_of_a_host_runs_again(hosts, job):
    flags = [*job, "--resume", "-pp", "2", "--max-num-seqs", "2"]
    agents = hosts.torchrun(1, *flags, max_restarts=3)
    try:
        wait_for_lines(job)
        for pid in [agents[1].pid, *descendants(agents[1].pid)]:
            os.kill(pid, signal.SIGKILL)
        time.sleep(3)
        num_lines, begin = job[-1].read_bytes().count(b"\n"), time.monotonic()
        agents += hosts.torchrun(1, *flags, max_restarts=3, numbers=[1])
        wait_for(lambda: job[-1].read_bytes().count(b"\n") > num_lines, 30)
        print(f"on again {time.monotonic() - begin:.1f} s after the agent")
    finally:
        for agent in agents:
            kill_tree(agent)
    assert "lines are already done" in finish(agents[0], 5).stderr


@pytest.mark.slow
def test_pulled_cable_ends_both_sides(hosts, job):
    agents = hosts.torchrun(2, *job, "-pp", "4", "--fault-timeout", "4")
    wait_for_lines(job)
    trees = [[agent.pid, *descendants(agent.pid)] for agent in agents]
    begin = time.monotonic()
    hosts.cable(1, "down")
    done = [finish(agent, 30, begin) for agent in agents]
    print([f"{each.seconds:.1f} s" for each in done])
    assert all(each.returncode != 0 and each.seconds < 15 for each in done)
    assert "no heartbeat from rank 2 on host-1 and rank 3 on host-1 for 4 s" in done[0].our_errors[0]
    assert done[1].our_errors, done[1].text
    assert "no heartbeat from rank 0 on host-0 for 4 s" in done[1].our_errors[0]
    assert not any(map(is_running, trees[0] + trees[1]))


@pytest.mark.slow
def test_mpirun_that_waits_for_a_host_behind_a_pulled_cable_is_ended(hosts, job):
    process = hosts.start(0, [*hosts.mpirun(2), sys.executable, LAUNCH, *job, "-pp", "4", "--fault-timeout", "4"])
    wait_for_lines(job)
    tree = [process.pid, *descendants(process.pid)]
    begin = time.monotonic()
    hosts.cable(1, "down")
    done = finish(process, 30, begin)
    print(f"{done.seconds:.1f} s")
    assert done.returncode != 0 and done.seconds < 15
    assert "no heartbeat from rank 2 on host-1 and rank 3 on host-1 for 4 s" in done.our_errors[0]
    assert "ending all ranks, and mpirun (process" in done.our_errors[0]
    wait_for(lambda: not any(map(is_running, tree)), 2)
