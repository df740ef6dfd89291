"""``launch.py simulate`` over a trace: its figures, the same for the same seed, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import equal_steps, make_model

from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.cli.bench.options import BenchOptions, LoadOptions, ServeOptions
from labinfer.cli.bench.serve import ServeBenchmark
from labinfer.cli.commands.simulate import run
from labinfer.cli.main import main
from labinfer.observe.output_file import OutputFile
from labinfer.observe.trace import read_trace
from labinfer.planner.simulator.options import SimulateOptions

BENCH = BenchOptions(input_len=20, output_len=6)
LOAD = LoadOptions(num_prompts=10)
SERVE = ServeOptions(request_rate=20.0)


@pytest.fixture
def recorded(tmp_path) -> Path:
    """The trace of a run on two stages of 10 and 20 ms."""
    path = tmp_path / "recorded.json"
    model = make_model(equal_steps(0.01, 0.02), 2, trace=OutputFile(str(path), "--trace"), num_slices=10_000)
    benchmark = ServeBenchmark(BENCH, LOAD, SERVE)
    benchmark.prepare(model)
    benchmark.run(model, lambda: None)
    return path


def simulate(path: Path, name: str, serve: ServeOptions = SERVE, find_rate: bool = False, **engine) -> bytes:
    """The JSON of a replay."""
    file = path.parent / name
    options, own = EngineOptions.from_flat(engine), SimulateOptions(replay=str(path), find_rate=find_rate)
    assert run(options, own, replace(BENCH, output_json=str(file)), LOAD, serve) == 0
    return file.read_bytes()


def test_replay_says_how_near_it_is(recorded, capfd):
    values = json.loads(simulate(recorded, "out.json"))
    assert values["simulated"] is True and values["completed"] == 10 and values["num_ranks"] == 2
    assert values["replayed_steps"] == values["num_steps"]
    assert values["working_time"] == pytest.approx(values["recorded_working_time"], rel=1e-3)
    assert values["bubbles"] == pytest.approx(values["recorded_bubbles"], abs=1e-3)
    assert values["stages"][1]["busy"] == pytest.approx(2 * values["stages"][0]["busy"], abs=1e-3)
    printed = capfd.readouterr().out
    assert printed.startswith("simulated on a virtual clock; all times are predictions\n\nin ")
    assert f"whole run including warm-up: {values['num_steps']} steps in " in printed
    assert "TTFT" in printed and "bubble of rank 1" in printed


def test_same_seed_gives_the_same_bytes(recorded):
    first, second = (simulate(recorded, name) for name in ("a.json", "b.json"))
    assert first == second
    assert simulate(recorded, "c.json", replace(SERVE, request_rate=21.0)) != first


def test_trace_of_a_simulation_can_be_replayed(recorded):
    again = recorded.parent / "again.json"
    first = json.loads(simulate(recorded, "a.json", trace=str(again)))
    tracks, _ = read_trace(str(again))
    assert [track.rank for track in tracks] == [0, 1]
    second = json.loads(simulate(again, "b.json"))
    assert second["duration"] == pytest.approx(first["duration"], rel=1e-3)


def test_highest_rate_keeps_the_goals_and_a_higher_one_does_not(recorded, capfd):
    goals = replace(SERVE, goodput=("ttft:200",))
    values = json.loads(simulate(recorded, "out.json", goals, find_rate=True, max_num_seqs=2))
    rate = values["highest_rate"]
    assert values["request_rate"] == rate and values["p99_ttft_ms"] <= 200
    beyond = json.loads(simulate(recorded, "beyond.json", replace(goals, request_rate=1.1 * rate), max_num_seqs=2))
    assert beyond["p99_ttft_ms"] > 200
    assert f"{rate:.3g} requests per second" in capfd.readouterr().out


def test_goal_that_no_rate_keeps_is_refused(recorded):
    with pytest.raises(UserError, match=r"no rate meets it.*TTFT is"):
        simulate(recorded, "out.json", replace(SERVE, goodput=("ttft:1",)), find_rate=True)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "simulate needs one source of step times"),
        (("--replay", "none.json"), "cannot read the trace none.json"),
        (("--replay", "{trace}", "--find-rate"), "--find-rate needs latency targets"),
        (("--replay", "{trace}", "--request-rate", "0"), "--request-rate must be above 0"),
        (("--replay", "{trace}", "--input-len", "10000"), "--input-len 10000"),
        (("--replay", "{trace}", "--dataset", "{dataset}"), "has no tokenizer"),
    ],
)
def test_what_makes_no_simulation_is_refused_in_a_line(recorded, capfd, flags, expected):
    dataset = recorded.parent / "dataset.jsonl"
    dataset.write_text('{"prompt": "Hello"}\n', encoding="utf-8")
    assert main(["simulate", *(flag.format(trace=recorded, dataset=dataset) for flag in flags)]) == 2
    error = capfd.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_trace_without_facts_is_refused(recorded, capfd):
    trace = json.loads(recorded.read_bytes())
    del trace["otherData"]
    recorded.write_text(json.dumps(trace), encoding="utf-8")
    assert main(["simulate", "--replay", str(recorded)]) == 2
    assert "lacks the engine's spec" in capfd.readouterr().err
