"""--trace on two stages: the slices of both ranks nest, cover every step, and are on one clock."""

from __future__ import annotations

import json
from collections import defaultdict

PARTS = {
    0: {"prepare", "run", "send"},
    1: {"prepare", "wait for activations", "run", "sample", "send"},
}
"""Of a step, by rank."""


def test_trace_of_two_stages(model, launches, tmp_path):
    trace, report = tmp_path / "trace.json", tmp_path / "report.json"
    lines = [{"prompt_token_ids": list(range(5, 9 + 3 * n)), "max_tokens": 6 + n, "ignore_eos": True} for n in range(6)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    paths = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--report", report]
    flags = ["--model", model, "-pp", "2", "--no-enable-prefix-caching"]
    done = launches.run("mpirun", 2, *flags, *paths, "--trace", trace)
    assert done.returncode == 0, done.text
    assert "outside the model" in done.stderr
    assert 0 < json.loads(report.read_text())["time_shares"]["run"] < 1
    by_rank = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            by_rank[event["pid"]].append(event)
    assert set(by_rank) == {0, 1}
    steps = {rank: [e for e in events if e["name"] == "step"] for rank, events in by_rank.items()}
    ids = [[e["args"]["step"] for e in steps[rank]] for rank in (0, 1)]
    assert ids[0] == ids[1] == list(range(len(ids[0]))) and len(ids[0]) >= 11
    tokens = [sum(e["args"]["tokens"] for e in steps[rank]) for rank in (0, 1)]
    prompts = sum(len(line["prompt_token_ids"]) for line in lines)
    assert tokens[0] == tokens[1] == prompts + sum(line["max_tokens"] - 1 for line in lines)
    for rank, events in by_rank.items():
        assert_nested(events)
        for step in steps[rank]:
            inside = {e["name"] for e in events if e is not step and lies_in(e, step)}
            assert inside == PARTS[rank], f"rank {rank}, step {step['args']['step']}"
            assert all(e["args"] == step["args"] for e in events if lies_in(e, step))
    for first, second in zip(steps[0], steps[1], strict=True):  # a stage needs what the one before computed
        assert begin_of(by_rank[0], first, "run") < end_of(by_rank[1], second, "wait for activations")
    engine = {e["name"] for e in by_rank[0]} - PARTS[0]
    assert engine == {"engine", "schedule", "broadcast", "step", "wait for tokens", "update", "detokenise"}
    waits = [e for e in by_rank[0] if e["name"] == "wait for tokens"]
    assert [e["args"]["step"] for e in waits] == ids[0]


def lies_in(inner: dict, outer: dict) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.001


def assert_nested(events: list[dict]) -> None:
    """Each slice lies in the one around it or begins after its end; times are rounded to nanoseconds."""
    around: list[dict] = []
    for event in events:
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + 0.001:
            around.pop()
        assert not around or lies_in(event, around[-1]), (event, around[-1])
        around.append(event)


def part_of(events: list[dict], step: dict, name: str) -> dict:
    return next(e for e in events if e["name"] == name and lies_in(e, step))


def begin_of(events: list[dict], step: dict, name: str) -> float:
    return part_of(events, step, name)["ts"]


def end_of(events: list[dict], step: dict, name: str) -> float:
    part = part_of(events, step, name)
    return part["ts"] + part["dur"]
