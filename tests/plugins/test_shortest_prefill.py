"""examples/plugins/shortest_prefill.py: short prompts overtake long ones, with the same tokens and without a deadlock."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from launchers import LAUNCH, ROOT, run
from scheduler_bench import Bench
from simulated import GivenTimes, make_model

from labinfer.base.plan import BatchPlan
from labinfer.base.sampling_params import SamplingParams
from labinfer.planner.simulator.plan_times import Hop, PlanTimes, StageTimes

PLUGIN, POLICY = str(ROOT / "examples/plugins/shortest_prefill.py"), "shortest_prefill"
LENGTHS = (400, 90, 20, 60)
"""Tokens of prompts in the order of their arrival."""


@pytest.fixture(autouse=True)
def loaded(load_example):
    load_example("shortest_prefill")


def first_tokens(policy: str, late_prompt: int = 0) -> list[int]:
    """Sequences in the order of their first tokens; a prompt of ``late_prompt`` tokens arrives when the others run."""
    bench = Bench(num_blocks=512, scheduling_policy=policy, max_num_batched_tokens=32)
    for num_tokens in LENGTHS:
        bench.add(num_tokens, 3)
    order = []
    while bench.scheduler.has_work:
        bench.launch_all()
        order += [sequence.seq_id for sequence in bench.update() if sequence.num_output_tokens == 1]
        if late_prompt and len(bench.plans) == 10:
            bench.add(late_prompt, 3)
    bench.finish_all()
    return order


def test_prompt_with_the_fewest_tokens_left_is_next():
    assert first_tokens("fcfs") == [0, 1, 2, 3]
    assert first_tokens(POLICY) == [2, 3, 1, 0]


def test_short_prompt_that_arrives_late_overtakes_a_running_one():
    assert first_tokens("fcfs", late_prompt=50) == [0, 1, 2, 3, 4]
    assert first_tokens(POLICY, late_prompt=50) == [
        2,
        3,
        1,
        4,
        0,
    ]  # after ten steps, prompt 0 has 250 of its 400 tokens left


def step_times(plan: BatchPlan) -> PlanTimes:
    """Two stages in which a step takes 1 ms and 0.1 ms a token."""
    stages = [StageTimes(prepare=0.0, run=1e-3 + 1e-4 * plan.num_tokens)] * 2
    return PlanTimes(schedule=0.0, broadcast=0.0, deliveries=[0.0, 0.0], stages=stages, hops=[Hop(0.0, 0.0)] * 2)


def times_to_first_token(policy: str) -> list[float]:
    """Seconds for two prompts of 2000 tokens and eight of 50 that arrive together."""
    model = make_model(GivenTimes(step_times), 2, scheduling_policy=policy, max_num_batched_tokens=128)
    lengths = [2000, 2000, *[50] * 8]
    sampling = SamplingParams(max_tokens=20)
    requests = [model.make_request(key, [key] * count, sampling) for key, count in enumerate(lengths)]
    outputs = {output.key: output for output in model.run(requests)}
    assert [len(outputs[key].completions[0].token_ids) for key in range(len(lengths))] == [20] * len(lengths)
    return [outputs[key].time_to_first_token for key in range(len(lengths))]


def test_mean_time_to_first_token_falls():
    before, after = times_to_first_token("fcfs"), times_to_first_token(POLICY)
    assert statistics.mean(after) < 0.5 * statistics.mean(before), (before, after)
    assert max(after[2:]) < 0.2 * min(before[2:]), "each short prompt gains"
    assert before[0] < after[0] < 1.3 * before[0], "the first long prompt waits for the short ones, and no longer"


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("num_steps", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_few_blocks_and_preemptions_end_in_no_deadlock(num_stages, num_steps):
    """``Bench`` fails if nothing can start while work is left."""
    bench, draw = (
        Bench(num_blocks=15, num_stages=num_stages, scheduling_policy=POLICY, max_num_batched_tokens=16),
        random.Random(1),
    )
    for _ in range(num_steps):
        bench.step_at_random(draw)
    bench.finish_all()
    assert bench.scheduler.counts["preemptions"] > num_steps / 30


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, ("-tp", "2"), marks=pytest.mark.slow),
        (2, ("-pp", "2")),
    ],
)
def test_job_answers_short_prompts_first_with_the_same_tokens(ranks, layout, tmp_path):
    given = tmp_path / "in.jsonl"
    lines = [{"id": n, "prompt_token_ids": [5 + n] * n, "max_tokens": 2, "ignore_eos": True} for n in (300, 9, 40)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--max-num-batched-tokens", "16", "--dtype", "float32", "--batch-policy", "balanced", *layout)
    answers = {}
    for policy in ("fcfs", POLICY):
        output = tmp_path / f"{policy}.jsonl"
        job = ("--input", given, "--output", output, "--plugin", PLUGIN, "--scheduling-policy", policy, *flags)
        done = run("torchrun" if ranks > 1 else "single", ranks, LAUNCH, *job)
        assert done.returncode == 0, done.text
        answers[policy] = [json.loads(line) for line in output.read_text().splitlines()]
    assert [[answer["id"] for answer in answers[policy]] for policy in answers] == [[300, 9, 40], [9, 40, 300]]
    tokens = [{answer["id"]: answer["token_ids"] for answer in answers[policy]} for policy in answers]
    assert tokens[0] == tokens[1]
