"""``--layout``: plans from files and plans of machines that measure themselves, on ranks that take this machine for several."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
from golden import PROMPTS, golden
from launchers import BIN, LAUNCH, Finished, finish, free_port, kill_tree, start
from waiting_ranks import run_in_turn

from labinfer.launch.measure.probe_layout import model_name
from labinfer.models.registry import load_config
from labinfer.planner.saved_plan import SavedPlan, SavedStage

NUM_TOKENS = 16
A, B = "node-a", "node-b"


class Jobs:
    """The same lines of input for each launch, and the check of what it answers."""

    def __init__(self, model: str, directory: Path):
        self.model, self._directory = model, directory
        self._name = model_name(load_config(Path(model)))
        lines = [{"id": i, "prompt_token_ids": ids, "max_tokens": NUM_TOKENS} for i, ids in enumerate(PROMPTS)]
        self.input = directory / "in.jsonl"
        self.input.write_text("".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines))

    def flags(self, name: str) -> list:
        """Those of a job whose answers go to a file of this name."""
        return ["--model", self.model, "--input", self.input, "--output", self._directory / name, "--threads", 1]

    def plan(self, name: str, *stages: tuple[str, int, int], model: str = "", **changes: str) -> str:
        """A file with a plan of stages (machine, tensor-parallel degree, layers)."""
        form = {"dtype": "float32", "quantization": "none"}
        saved = [
            SavedStage(machine=machine, tp_size=tp_size, layers=layers, **(form | (changes if number else {})))
            for number, (machine, tp_size, layers) in enumerate(stages)
        ]
        path = self._directory / f"{name}.json"
        path.write_bytes(msgspec.json.encode(SavedPlan(model=model or self._name, stages=saved)))
        return str(path)

    def check(self, name: str, done: Finished) -> None:
        assert done.returncode == 0, done.text
        lines = (self._directory / name).read_text().splitlines()
        records = {record["id"]: record["token_ids"] for record in map(json.loads, lines)}
        tokens = golden("qwen2-tied").tokens
        assert records == {number: answer[:NUM_TOKENS] for number, answer in enumerate(tokens)}, done.text


@pytest.fixture
def jobs(model, tmp_path) -> Jobs:
    return Jobs(model, tmp_path)


def placed(done: Finished) -> list[tuple[str, ...]]:
    """Rank, host, stage, tp rank and layers, from the table of a start; the host is empty if there is only one."""
    lines = done.stderr.splitlines()
    (begin,) = (number for number, line in enumerate(lines) if line.startswith("rank  ") and " layers " in line)
    header = lines[begin].split()
    rows = [dict(zip(header, line.split(), strict=False)) for line in lines[begin + 2 :]]
    names = ("rank", "host", "stage", "tp", "layers")
    return [tuple(row.get(name, "") for name in names) for row in takewhile(lambda row: row["rank"].isdigit(), rows)]


def test_plan_of_a_file_is_followed_or_refused_in_one_line(jobs, tmp_path):
    """Ranks of a machine need not be neighbours."""
    whole, spare = jobs.plan("whole", (A, 2, 3), (B, 1, 1)), jobs.plan("spare", (A, 1, 3), (B, 1, 1))
    refused = {
        "nowhere.json": "cannot read --layout nowhere.json: No such file or directory",
        str(jobs.input): "is not a plan",
        jobs.plan("other", (A, 1, 4), model="other"): "is for another model (other) than --model",
        jobs.plan("absent", (A, 1, 3), ("node-c", 1, 1)): "has a stage on node-c, but ranks run only on node-a, node-b",
        jobs.plan("few", (A, 1, 2), (B, 2, 2)): "needs 2 ranks on node-b, which has 1",
        jobs.plan(
            "first", (B, 1, 2), (A, 1, 2)
        ): "first stage on node-b, but rank 0 is on node-a; start rank 0 on node-b",
    }
    cases = {f"refused {path}": [*jobs.flags("refused"), "--layout", path] for path in refused}
    cases |= {
        "contradiction": [*jobs.flags("refused"), "--layout", whole, "--layers", "3,1"],
        "two models": ["serve", "--model", jobs.model, "--model", "demo", "--layout", whole],
        "whole": [*jobs.flags("whole"), "--layout", whole],
        "spare": [*jobs.flags("spare"), "--layout", spare],
        "mixed": [*jobs.flags("mixed"), "--layout", jobs.plan("mixed", (A, 1, 2), (B, 1, 2), quantization="int8")],
    }
    ended = run_in_turn("mpirun", 3, cases, tmp_path, nodes=(A, B, A))
    for path, text in refused.items():
        done = ended[f"refused {path}"]
        assert done.returncode == 2 and len(done.our_errors) == 1, done.text
        assert text in done.our_errors[0] and "Traceback" not in done.text
    assert "--layout whole.json already sets --layers" in ended["contradiction"].our_errors[0].replace(
        f"{tmp_path}/", ""
    )
    assert "--layout supports one model" in ended["two models"].our_errors[0]
    jobs.check("whole", ended["whole"])
    assert placed(ended["whole"]) == [
        ("0", A, "0", "0", "0-2"),
        ("1", B, "1", "0", "3-3"),
        ("2", A, "0", "1", "0-2"),
    ]
    jobs.check("spare", ended["spare"])
    assert "layers 0-2 on node-a (rank 0), layers 3-3 on node-b (rank 1); spare: rank 2" in ended["spare"].stderr
    assert ended["mixed"].returncode == 0, ended["mixed"].text
    rows = [re.split(" {2,}", line.strip()) for line in ended["mixed"].stderr.splitlines() if " node-" in line]
    assert [row[6] for row in rows if len(row) == 10] == ["float32", "float32, int8"]


def test_machines_that_measure_are_planned_for(jobs, tmp_path):
    saved, flags = tmp_path / "saved.json", ["--model", jobs.model, "--threads", 1]
    less, narrow = tmp_path / "less.json", ["--memory-utilization", 0.001, "--max-num-seqs", 4096]
    cases = {
        "plan": ["plan", "--auto", *flags, "--save", saved],
        "auto": [*jobs.flags("auto"), "--layout", "auto", "--speculative-config", json.dumps({"model": jobs.model})],
        "saved": [*jobs.flags("saved"), "--layout", saved],
        "plan for less": ["plan", "--auto", *flags, *narrow, "--save", less],
        "with less": [*jobs.flags("with less"), *narrow, "--layout", less],
        "layers": ["plan", "--auto", *flags, "--layers", "2,2"],
        "link": ["plan", "--auto", *flags, "--link", "1gbit,1ms"],
    }
    ended = run_in_turn("mpirun", 2, cases, tmp_path, nodes=(A, B))
    plan = ended["plan"]
    assert plan.returncode == 0, plan.text
    assert "predicted:" in plan.stdout and f"start with --layout {saved}, or with -tp" in plan.stdout
    layers = [stage.layers for stage in SavedPlan.read(str(saved)).stages]
    assert sum(layers) == 4
    jobs.check("auto", ended["auto"])
    assert "costs of 2 machines: cached" in ended["auto"].stderr
    assert re.search(r"--layout auto: layers 0-\d on node-a \(rank 0\)", ended["auto"].stderr)
    jobs.check("saved", ended["saved"])
    for planned, started in (("plan", "saved"), ("plan for less", "with less")):
        told = int(re.search(r"KV tokens: (\d+)", ended[planned].stdout)[1])
        had = 16 * int(re.search(r"KV cache: (\d+) blocks of 16", ended[started].stderr)[1])
        # Of this machine's memory others may take more in between than a plan keeps in reserve.
        assert had == told or f"{had} tokens fit, fewer than the {told} of the plan: stage" in ended[started].stderr
    assert len(placed(ended["saved"])) == len(layers) and placed(ended["saved"])[0][4] == f"0-{layers[0] - 1}"
    assert "plan --auto chooses --layers itself" in ended["layers"].our_errors[0]
    assert "--link needs --cluster" in ended["link"].our_errors[0]


@pytest.mark.slow
def test_agents_of_torchrun_need_the_plan_on_rank_0_only(jobs):
    """The other one is given a path at which there is nothing."""
    flags, port = jobs.flags("out"), free_port()
    path = jobs.plan("plan", (A, 1, 1), (B, 1, 3))
    agents = []
    for number, (node, layout) in enumerate(((A, path), (B, "nowhere.json"))):
        agent = [str(BIN / "torchrun"), "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
        agent += ["--master-addr=127.0.0.1", f"--master-port={port}", LAUNCH, *map(str, flags), "--layout", layout]
        agents.append(start(agent, LABINFER_NODE_NAME=node))
    try:
        done = [finish(agent, 60) for agent in agents]
    finally:
        for agent in agents:
            kill_tree(agent)
    assert done[1].returncode == 0, done[1].text
    jobs.check("out", done[0])
    assert placed(done[0]) == [("0", A, "0", "0", "0-0"), ("1", B, "1", "0", "1-3")]
