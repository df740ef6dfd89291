"""SimulatedExecutor against recurrences that were computed by hand, and the pipeline schedules against their formulas."""

from __future__ import annotations

from collections import defaultdict

import pytest
from simulated import GivenTimes, equal_steps, make_model, make_plan, topology

from labinfer.base.plan import BatchPlan
from labinfer.base.sampling_params import SamplingParams
from labinfer.observe.trace import make_tracks
from labinfer.planner.simulator.clock import VirtualClock
from labinfer.planner.simulator.executor import SimulatedExecutor
from labinfer.planner.simulator.plan_times import Forward, Hop, PlanTimes, StageTimes
from labinfer.requests.prompts import TokensPrompt

TWO_STAGES = PlanTimes(
    schedule=1.0,
    broadcast=1.0,
    deliveries=[0.0, 2.0],
    stages=[StageTimes(prepare=0.0, run=5.0), StageTimes(prepare=1.0, run=4.0, sample=3.0)],
    hops=[Hop(transfer=1.0, latency=2.0), Hop(transfer=0.0, latency=3.0)],
)


@pytest.fixture
def virtual_clock() -> VirtualClock:
    return VirtualClock()


def make_executor(times: PlanTimes, clock: VirtualClock, num_slices: int = 0, **layout) -> SimulatedExecutor:
    places = topology(len(times.stages), **layout)
    return SimulatedExecutor(places, GivenTimes(lambda plan: times), clock, vocab_size=1000, capacity=num_slices)


def test_two_stages_by_hand(virtual_clock):
    executor = make_executor(TWO_STAGES, virtual_clock)
    executor.launch(make_plan(0))  # sent at 1, run from 2 to 7; on the link until 8, there at 10
    assert virtual_clock() == 7.0
    executor.launch(make_plan(1))  # sent at 8, run from 9 to 14; there at 17
    assert virtual_clock() == 14.0
    assert executor.wait_result().step_id == 0  # run from 10 to 14, sampled at 17, back at 20
    assert virtual_clock() == 20.0
    executor.wait_result()  # the stage is free at 17, prepared at 18, sampled at 25
    assert virtual_clock() == 28.0


def test_result_that_came_before_is_not_waited_for(virtual_clock):
    executor = make_executor(TWO_STAGES, virtual_clock)
    executor.launch(make_plan(0))
    virtual_clock.sleep(100.0)
    executor.wait_result()
    assert virtual_clock() == 107.0


def test_link_carries_one_message_at_a_time(virtual_clock):
    times = PlanTimes(
        schedule=0.0,
        broadcast=0.0,
        deliveries=[0.0, 0.0],
        stages=[StageTimes(prepare=0.0, run=1.0), StageTimes(prepare=0.0, run=0.0)],
        hops=[Hop(transfer=10.0, latency=0.5), Hop(transfer=0.0, latency=0.0)],
    )
    executor = make_executor(times, virtual_clock)
    for step_id in range(3):
        executor.launch(make_plan(step_id))
    arrivals = []
    for _ in range(3):
        executor.wait_result()
        arrivals.append(virtual_clock())
    assert arrivals == [11.5, 21.5, 31.5]


def test_rank_0_in_the_last_stage_runs_it_when_a_result_is_waited_for(virtual_clock):
    executor = make_executor(TWO_STAGES, virtual_clock, ranks=(1, 0))
    executor.launch(make_plan(0))  # sent at 1; the first stage has it at once, and is done at 6: there at 9
    assert virtual_clock() == 2.0
    executor.launch(make_plan(1))  # sent at 3; run from 6 to 11, there at 14
    assert virtual_clock() == 4.0
    executor.wait_result()  # prepared at 5, run from 9, sampled at 16; no way back
    assert virtual_clock() == 16.0
    executor.wait_result()  # prepared at 17
    assert virtual_clock() == 24.0


def test_rank_0_in_a_middle_stage_runs_all_its_plans_before_it_waits(virtual_clock):
    times = PlanTimes(
        schedule=0.0,
        broadcast=0.0,
        deliveries=[0.0] * 3,
        stages=[StageTimes(prepare=0.0, run=seconds) for seconds in (1.0, 4.0, 1.0)],
        hops=[Hop(0.0, 0.0)] * 3,
    )
    executor = make_executor(times, virtual_clock, ranks=(1, 0, 2))
    executor.launch(make_plan(0))
    executor.launch(make_plan(1))
    executor.wait_result()  # it was back at 6, but rank 0 runs the second plan until 9
    assert virtual_clock() == 9.0
    executor.wait_result()
    assert virtual_clock() == 10.0


def test_forwarded_plan_comes_when_the_stage_before_has_taken_it(virtual_clock):
    times = PlanTimes(
        schedule=0.0,
        broadcast=1.0,
        deliveries=[0.0, 2.0, 0.0],
        stages=[StageTimes(prepare=0.0, run=1.0), StageTimes(prepare=0.0, run=9.0), StageTimes(prepare=5.0, run=1.0)],
        hops=[Hop(0.0, 0.0)] * 3,
        forwards=[[], [], [Forward(1, 8.0)]],
    )
    executor = make_executor(times, virtual_clock)
    executor.launch(make_plan(0))  # sent at 0, taken by the middle stage at 2, which is done at 11; by the last at 10
    executor.launch(make_plan(1))  # sent at 2, taken by the middle stage at 11, which is done at 20; by the last at 19
    executor.wait_result()
    assert virtual_clock() == 16.0
    executor.wait_result()
    assert virtual_clock() == 25.0


def test_every_row_that_samples_gets_a_token(virtual_clock):
    executor = make_executor(TWO_STAGES, virtual_clock)
    executor.launch(make_plan(0, num_samples=2))
    assert [entry.token_ids for entry in executor.wait_result().entries] == [(10, 10)]


def test_slices_of_all_ranks_tell_what_was_computed(virtual_clock):
    executor = make_executor(TWO_STAGES, virtual_clock, num_slices=100, tp_sizes=(1, 2))
    executor.launch(make_plan(0))
    executor.wait_result()
    workers = executor.end_run([])
    spans = [
        {slice.name: (slice.begin / 1e9, slice.end / 1e9) for slice in track.slices} for track in make_tracks(workers)
    ]
    assert spans[0] == {
        "schedule": (0.0, 1.0),
        "broadcast": (1.0, 2.0),
        "step": (2.0, 7.0),
        "prepare": (2.0, 2.0),
        "run": (2.0, 7.0),
        "send": (7.0, 7.0),
        "wait for tokens": (7.0, 20.0),
    }
    assert (
        spans[1]
        == spans[2]
        == {
            "wait for a plan": (0.0, 3.0),
            "step": (3.0, 17.0),
            "prepare": (3.0, 4.0),
            "wait for activations": (4.0, 10.0),
            "run": (10.0, 14.0),
            "sample": (14.0, 17.0),
            "send": (17.0, 17.0),
        }
    )
    assert [worker.busy_time for worker in workers] == [5.0, 8.0, 8.0]
    assert [(worker.rank, worker.stage, worker.tp_rank) for worker in workers] == [(0, 0, 0), (1, 1, 0), (2, 1, 1)]
    assert executor.end_run([])[0].busy_time == 0.0


# The engine over it: what a round of all sequences takes, by schedule.


def rounds(*seconds: float, hop: float = 0.0, num_requests: int = 2, **scheduling) -> float:
    """Seconds from one token of the first request to the next, in the middle of the run."""
    model = make_model(equal_steps(*seconds, hop=hop), len(seconds), **scheduling)
    tokens: defaultdict[int, list[float]] = defaultdict(list)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [model.make_request(key, TokensPrompt([1, key + 2]), sampling) for key in range(num_requests)]
    list(model.run(requests, on_delta=lambda delta: tokens[delta.key].append(model.clock())))
    times = tokens[0]
    assert len(times) == 20
    return times[12] - times[11]


@pytest.mark.parametrize("seconds", [(2.0, 3.0), (3.0, 2.0), (2.0, 2.0)])
def test_lockstep_takes_the_sum_of_the_stages(seconds):
    assert rounds(*seconds, pipeline_schedule="lockstep") == pytest.approx(sum(seconds))
    assert rounds(*seconds, hop=0.25, pipeline_schedule="lockstep") == pytest.approx(sum(seconds) + 0.5)


def test_gpipe_fills_and_drains():
    assert rounds(2.0, 3.0, pipeline_schedule="gpipe") == pytest.approx(2.0 + 2 * 3.0)
    assert rounds(3.0, 2.0, pipeline_schedule="gpipe") == pytest.approx(2 * 3.0 + 2.0)
    assert rounds(3.0, 2.0, hop=0.25, pipeline_schedule="gpipe") == pytest.approx(2 * 3.0 + 2.0 + 2 * 0.25)


def test_1f1b_is_bound_by_the_slowest_stage_or_the_way_through():
    assert rounds(2.0, 3.0) == pytest.approx(2 * 3.0)
    assert rounds(2.0, 2.0, 3.0, num_requests=3) == pytest.approx(3 * 3.0)
    assert rounds(2.0, 3.0, hop=1.0) == pytest.approx(2.0 + 3.0 + 2 * 1.0)
    assert rounds(2.0, 3.0, num_requests=1) == pytest.approx(2.0 + 3.0)


def test_more_micro_batches_hide_hops():
    assert rounds(2.0, 3.0, hop=2.0, num_requests=3, max_inflight=3) == pytest.approx(3 * 3.0)


def test_cost_may_follow_the_plan():
    def double_for_prompts(plan: BatchPlan) -> PlanTimes:
        seconds = 2.0 if plan.num_decodes < plan.num_tokens else 1.0
        return equal_steps(seconds).times(plan)

    model = make_model(GivenTimes(double_for_prompts), 1)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    output = next(model.run([model.make_request(0, TokensPrompt([1, 2]), sampling)]))
    assert (output.time_to_first_token, output.time_per_output_token, output.total_time) == (2.0, 1.0, 4.0)
