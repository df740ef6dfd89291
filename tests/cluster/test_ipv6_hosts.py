"""Hosts that have IPv6 addresses only."""

from __future__ import annotations

import json

import pytest
from golden import PROMPTS, golden
from hosts import Hosts, needs_hosts
from launchers import finish

pytestmark = needs_hosts


@pytest.fixture
def hosts(tmp_path):
    with Hosts.made(2, tmp_path, ipv6=True) as hosts:
        yield hosts


def test_pipeline_between_hosts_under_torchrun(hosts, model, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": i, "prompt_token_ids": ids, "max_tokens": 8, "ignore_eos": True} for i, ids in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    agents = hosts.torchrun(1, "--model", model, "--input", path, "--output", out, "-pp", "2", "--timeout", "30")
    done = [finish(agent, 120) for agent in agents]
    assert [d.returncode for d in done] == [0, 0], done[0].text + done[1].text
    records = {record["id"]: record["token_ids"] for record in map(json.loads, out.read_text().splitlines())}
    assert records == {index: answer[:8] for index, answer in enumerate(golden("qwen2-tied").tokens)}
