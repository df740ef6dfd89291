"""Hosts that have IPv6 addresses only."""

from __future__ import annotations

import json
import sys

import pytest
from golden import PROMPTS, golden
from hosts import Hosts, needs_hosts
from launchers import LAUNCH, finish

pytestmark = needs_hosts


@pytest.fixture
def hosts(tmp_path):
    with Hosts.made(2, tmp_path, ipv6=True) as hosts:
        yield hosts


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("slurm", marks=pytest.mark.slow)])
def test_pipeline_between_hosts(launcher, hosts, model, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": i, "prompt_token_ids": ids, "max_tokens": 8, "ignore_eos": True} for i, ids in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--model", model, "--input", path, "--output", out, "-pp", "2", "--timeout", "30"]
    if launcher == "torchrun":
        started = hosts.torchrun(1, *flags)
    else:
        common = {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_ADDR": hosts.addresses[0]}
        started = []
        for number in range(2):
            variables = common | {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": 0}
            words = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, LAUNCH, *flags]
            started.append(hosts.start(number, words))
    done = [finish(process, 120) for process in started]
    assert [d.returncode for d in done] == [0, 0], done[0].text + done[1].text
    records = {record["id"]: record["token_ids"] for record in map(json.loads, out.read_text().splitlines())}
    assert records == {index: answer[:8] for index, answer in enumerate(golden("qwen2-tied").tokens)}
