"""Two hosts with a firewall between them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hosts import Hosts, needs_hosts
from launchers import LAUNCH, finish

pytestmark = needs_hosts
PORTS = "29600-29609"


@pytest.fixture
def hosts(tmp_path):
    with Hosts.made(2, tmp_path) as hosts:
        yield hosts


def test_port_behind_a_firewall_is_named_with_what_to_do(hosts, model):
    hosts.drop(0, PORTS)
    flags = ["--model", model, "--prompt", "x", "-pp", "2", "--timeout", "10", "--port-range", PORTS]
    agents = hosts.torchrun(1, *flags)
    done = [finish(agent, 100) for agent in agents]
    assert all(each.returncode for each in done)
    (line,) = done[1].our_errors
    assert "rank 1 cannot reach rank 0 on port 29600 (10.99.7.1: timed out" in line
    assert "a firewall may block the ports of the ranks" in line and "--port-range LOW-HIGH" in line
    assert any(
        "labinfer: warning: --port-range 29600-29609 applies to the health channel only" in text
        for text in done[0].stderr.splitlines()
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_ports_of_the_range_are_all_that_ranks_need(launcher, hosts, model, tmp_path):
    out = tmp_path / "out.jsonl"
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 0, "prompt": "red", "max_tokens": 3}\n')
    for number in range(2):
        hosts.let_through(number, "29500-29699")  # that of torchrun's store is 29517
    flags = ["--model", model, "--input", path, "--output", out, "-pp", "2", "--timeout", "60"]
    flags += ["--port-range", "29500-29699"]
    if launcher == "torchrun":
        for number in range(2):
            namespace = ["ip", "netns", "exec", hosts.namespace(number)]
            sysctl = "echo 29520 29699 > /proc/sys/net/ipv4/ip_local_port_range"
            subprocess.run([*namespace, "sh", "-c", sysctl], check=True)
        started = hosts.torchrun(1, *flags)
    else:
        mpirun = ["env", "MPIEXEC_PORT_RANGE=29500:29699", *hosts.mpirun(1)]
        started = [hosts.start(0, [*mpirun, sys.executable, LAUNCH, *flags])]
    done = [finish(process, 120) for process in started]
    assert not any(each.returncode for each in done), done[0].text
    assert out.read_text().count("token_ids") == 1
    assert "labinfer: warning" not in done[0].stderr
