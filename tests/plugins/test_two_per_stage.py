"""examples/plugins/two_per_stage.py: more micro-batches hide slow links, at the price of more steps, with the same tokens."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from launchers import LAUNCH, ROOT, run
from scheduler_bench import Bench
from simulated import GivenTimes, make_model

from labinfer.base.plan import BatchPlan
from labinfer.base.sampling_params import SamplingParams
from labinfer.engine.policies import throttle
from labinfer.planner.simulator.plan_times import Hop, PlanTimes, StageTimes
from labinfer.requests.prompts import TokensPrompt

PLUGIN, SCHEDULE = str(ROOT / "examples/plugins/two_per_stage.py"), "two_per_stage"
SCHEDULES = ("1f1b", SCHEDULE)
HOP = 1.0
"""Seconds from a stage to the next one, and from the last one to the first."""


@pytest.fixture(autouse=True)
def loaded(load_example):
    load_example("two_per_stage")


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_twice_as_many_are_in_flight(num_stages):
    in_flight = {}
    for schedule in SCHEDULES:
        bench = Bench(num_blocks=200, num_stages=num_stages, pipeline_schedule=schedule, batch_policy="balanced")
        for _ in range(4 * num_stages):
            bench.add(4, 12)
        counts = []
        while bench.scheduler.has_work:
            bench.launch_all()
            counts.append(len(bench.scheduler.in_flight))
            bench.update()
        bench.finish_all()
        in_flight[schedule] = max(counts)
    assert in_flight == {"1f1b": num_stages, SCHEDULE: 2 * num_stages}


def test_both_schedules_have_the_same_batch_policy():
    """Otherwise a comparison of two schedules would be one of two batch policies."""
    for schedule in SCHEDULES:
        assert Bench(num_stages=2, pipeline_schedule=schedule).scheduler._batch_policy is throttle
        assert Bench(num_stages=1, pipeline_schedule=schedule).scheduler._batch_policy is not throttle


def round_seconds(schedule: str, of_a_step: float, of_a_token: float) -> float:
    """Seconds for one token of each of four sequences, on two stages whose steps take a constant time and one for each token."""

    def times(plan: BatchPlan) -> PlanTimes:
        stages = [StageTimes(prepare=0.0, run=of_a_step + of_a_token * plan.num_tokens)] * 2
        return PlanTimes(schedule=0.0, broadcast=0.0, deliveries=[0.0] * 2, stages=stages, hops=[Hop(0.0, HOP)] * 2)

    model = make_model(GivenTimes(times), 2, pipeline_schedule=schedule)
    arrivals: defaultdict[int, list[float]] = defaultdict(list)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [model.make_request(key, TokensPrompt([1, key + 2]), sampling) for key in range(4)]
    list(model.run(requests, on_delta=lambda delta: arrivals[delta.key].append(model.clock())))
    return arrivals[0][12] - arrivals[0][11]


def test_slow_links_are_hidden():
    # Two micro-batches of two sequences: 2 s in each stage and two hops. Four of one sequence: 1 s in each, and two hops.
    assert round_seconds("1f1b", 0.0, 1.0) == pytest.approx(2 + 2 + 2 * HOP)
    assert round_seconds(SCHEDULE, 0.0, 1.0) == pytest.approx(1 + 1 + 2 * HOP)


def test_constant_steps_are_paid_twice():
    assert round_seconds("1f1b", 3.0, 0.0) == pytest.approx(3 + 3 + 2 * HOP)
    assert round_seconds(SCHEDULE, 3.0, 0.0) == pytest.approx(4 * 3)  # the slowest stage runs four micro-batches


@pytest.mark.parametrize(
    ("launcher", "layout"),
    [
        pytest.param("single", (), marks=pytest.mark.slow),
        pytest.param("torchrun", ("-tp", "2"), marks=pytest.mark.slow),
        ("mpirun", ("-pp", "2")),
        pytest.param("torchrun", ("-pp", "2"), marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_on_every_layout(launcher, layout, tmp_path):
    given, answers = tmp_path / "in.jsonl", {}
    lines = [{"prompt_token_ids": [5 + key, 6, 7], "max_tokens": 12, "ignore_eos": True} for key in range(8)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for schedule in SCHEDULES:
        output, report = tmp_path / f"{schedule}.jsonl", tmp_path / f"{schedule}.json"
        flags = ("--plugin", PLUGIN, "--pipeline-schedule", schedule, "--dtype", "float32", *layout)
        job = ("--input", given, "--output", output, "--report", report)
        done = run(launcher, 2 if layout else 1, LAUNCH, *job, *flags)
        assert done.returncode == 0, done.text
        answers[schedule] = sorted(output.read_text().splitlines())
        assert json.loads(report.read_text())["plugins"][0].startswith("two_per_stage@")
    assert len(answers[SCHEDULE]) == 8 and answers[SCHEDULE] == answers["1f1b"]
