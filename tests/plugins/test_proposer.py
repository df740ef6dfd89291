"""A proposer that a plugin registers, on two ranks: it drafts on rank 0, and the answers stay the same."""

from __future__ import annotations

import json

import pytest
from launchers import LAUNCH, matrix, run

PLUGIN = """from labinfer import register

@register("proposer", "last_token")
class LastToken:
    def __init__(self, options, facts):
        pass

    def propose(self, sequences, limits):
        return [[sequence.token_ids[-1]] * min(limit, 3) for sequence, limit in zip(sequences, limits)]

    def forget(self, sequences):
        pass
"""
CONFIG = '{"method": "last_token", "num_speculative_tokens": 3}'


@pytest.mark.parametrize(("launcher", "layout"), matrix(("torchrun", "-pp"), over=[("-pp",), ("-tp",)]))
def test_plugged_in_proposer_drafts_on_two_ranks(launcher, layout, tmp_path):
    (tmp_path / "drafting.py").write_text(PLUGIN)
    given, flags = tmp_path / "in.jsonl", ("--dtype", "float32", layout, "2")
    given.write_text("".join(json.dumps({"prompt": f"{i} {i} {i} {i}", "max_tokens": 20}) + "\n" for i in range(3)))
    tokens, reports = [], []
    for own in ((), ("--plugin", tmp_path / "drafting.py", "--speculative-config", CONFIG)):
        out, report = tmp_path / f"out{len(own)}.jsonl", tmp_path / f"report{len(own)}.json"
        done = run(launcher, 2, LAUNCH, "--input", given, "--output", out, "--report", report, *flags, *own)
        assert done.returncode == 0, done.text
        records = [json.loads(line) for line in out.read_text().splitlines()]
        tokens.append({record["id"]: record["token_ids"] for record in records})
        reports.append(json.loads(report.read_text()))
    assert tokens[0] == tokens[1] and len(tokens[0]) == 3
    assert reports[1]["speculation"]["drafted"] > 0, reports[1]["speculation"]


def test_method_of_no_plugin_is_refused_in_one_line():
    done = run("single", 1, LAUNCH, "--speculative-config", CONFIG, "--prompt", "x")
    assert done.returncode == 2 and len(done.our_errors) == 1
    assert "method 'last_token' is not one of ngram, mtp, draft_model, nor a Python file" in done.our_errors[0]
