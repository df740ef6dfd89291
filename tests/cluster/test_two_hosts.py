"""Two hosts with names and addresses of their own, joined by a cable: network namespaces on this machine (Linux, root)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from golden import PROMPTS, golden
from launchers import BIN, LAUNCH, descendants, finish, start
from serving import is_running

ADDRESSES = ("10.99.7.1", "10.99.7.2")


def may_make_hosts() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    probe = f"labinfer-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return made


pytestmark = pytest.mark.skipif(not may_make_hosts(), reason="needs root, ip and unshare to make two hosts")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path):
    """The names of two namespaces with a link between them, and the hosts file of both."""
    names = [f"labinfer{os.getpid()}{side}" for side in "ab"]
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", "lab0", "netns", names[0], "type", "veth", "peer", "name", "lab0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "lab0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "lab0", "up")
        hosts_file = tmp_path / "hosts"
        # They do not know each other's names, and have no default route: what is left is the cable between them.
        hosts_file.write_text("127.0.0.1 localhost\n")
        yield names, hosts_file
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_on_both(hosts, ranks_each: int, *flags: str) -> list[subprocess.Popen]:
    """A torchrun agent on each host, each knowing its own name."""
    names, hosts_file = hosts
    agents = []
    for node, name in enumerate(names):
        program = [str(BIN / "torchrun"), "--nnodes=2", f"--nproc-per-node={ranks_each}", f"--node-rank={node}"]
        program += [f"--master-addr={ADDRESSES[0]}", "--master-port=29517", LAUNCH, *map(str, flags)]
        shell = f'mount --bind {hosts_file} /etc/hosts && hostname host-{node} && exec "$@"'
        agents.append(
            start(["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", shell, "sh", *program])
        )
    return agents


def test_pipeline_between_hosts_and_tensor_parallel_inside(hosts, model, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": i, "prompt_token_ids": ids, "max_tokens": 32, "ignore_eos": True} for i, ids in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    agents = start_on_both(hosts, 2, "--model", model, "--input", path, "--output", out, "-tp", "2", "-pp", "2")
    done = [finish(agent, 90) for agent in agents]
    assert [d.returncode for d in done] == [0, 0], done[0].text + done[1].text
    records = {record["id"]: record["token_ids"] for record in map(json.loads, out.read_text().splitlines())}
    assert records == {index: answer[:32] for index, answer in enumerate(golden("qwen2-tied").tokens)}
    assert [line.split()[1] for line in done[0].stderr.splitlines() if line.strip()[:1].isdigit()][:4] == [
        "host-0"
    ] * 2 + ["host-1"] * 2


@pytest.mark.slow  # two names on one host are refused in the same way, in test_bad_input.py
def test_tp_group_over_both_hosts_is_refused_by_name(hosts, model):
    agents = start_on_both(hosts, 1, "--model", model, "--prompt", "x", "-tp", "2")
    done = [finish(agent, 60) for agent in agents]
    assert all(d.returncode != 0 for d in done)
    assert len(done[0].our_errors) == 1
    assert "rank 0 on host-0, rank 1 on host-1" in done[0].our_errors[0]


def test_host_that_dies_ends_the_run_on_the_other(hosts, model, tmp_path):
    lines = [{"id": i, "prompt_token_ids": [5 + i] * 20, "max_tokens": 100, "ignore_eos": True} for i in range(300)]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    agents = start_on_both(hosts, 1, "--model", model, "--input", path, "--output", out, "-pp", "2")
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size > 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    begin = time.monotonic()
    for pid in [agents[1].pid, *descendants(agents[1].pid)]:
        os.kill(pid, signal.SIGKILL)
    done = finish(agents[0], 30, begin)
    finish(agents[1], 5)
    assert done.returncode != 0
    assert done.seconds < 10
    assert all("token_ids" in json.loads(line) for line in out.read_text().splitlines())


@pytest.mark.slow
def test_pulled_cable_ends_both_sides(hosts, model, tmp_path):
    lines = [{"id": i, "prompt_token_ids": [5 + i] * 20, "max_tokens": 100, "ignore_eos": True} for i in range(300)]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--model", model, "--input", path, "--output", out, "-pp", "4", "--fault-timeout", "4")
    agents = start_on_both(hosts, 2, *flags)
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size > 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trees = [[agent.pid, *descendants(agent.pid)] for agent in agents]
    begin = time.monotonic()
    ip("-n", hosts[0][1], "link", "set", "lab0", "down")
    done = [finish(agent, 30, begin) for agent in agents]
    print([f"{each.seconds:.1f} s" for each in done])
    assert all(each.returncode != 0 and each.seconds < 15 for each in done)
    assert "no sign of life of rank 2 on host-1 and rank 3 on host-1 for 4 s" in done[0].our_errors[0]
    assert "no sign of life of rank 0 on host-0 for 4 s" in done[1].our_errors[0]
    assert not any(map(is_running, trees[0] + trees[1]))
