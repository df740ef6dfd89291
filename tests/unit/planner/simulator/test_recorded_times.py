"""RecordedTimes: a trace's own times give its run again, on every layout; and what is no trace is refused."""

from __future__ import annotations

import random

import pytest
from simulated import GivenTimes, make_model, make_plan

from labinfer.base.errors import UserError
from labinfer.base.plan import BatchPlan
from labinfer.base.sampling_params import SamplingParams
from labinfer.observe.output_file import OutputFile
from labinfer.observe.trace import Slice, Track, make_tracks, read_trace
from labinfer.planner.simulator.model import SimulatedModel
from labinfer.planner.simulator.plan_times import Hop, PlanTimes, StageTimes
from labinfer.planner.simulator.recorded_times import RecordedTimes, busy_fraction, step_shapes, working_time
from labinfer.requests.prompts import TokensPrompt


def random_times(num_stages: int, seed: int) -> GivenTimes:
    """Times that differ from step to step, in nanoseconds."""
    draw = random.Random(seed)
    drawn: dict[int, PlanTimes] = {}

    def times(plan: BatchPlan) -> PlanTimes:
        if plan.step_id not in drawn:
            seconds = [draw.randint(1, 9_000_000) / 1e9 for _ in range(3 * num_stages + 4)]
            drawn[plan.step_id] = PlanTimes(
                schedule=seconds.pop(),
                broadcast=seconds.pop() / 10,
                deliveries=[seconds.pop() / 10 for _ in range(num_stages)],
                stages=[
                    StageTimes(seconds.pop() / 10, 3 * seconds.pop(), 0.002 * (stage == num_stages - 1))
                    for stage in range(num_stages)
                ],
                hops=[Hop(0.0, 0.0005)] * num_stages,
                collect=seconds.pop() / 100,
            )
        return drawn[plan.step_id]

    return GivenTimes(times)


def run(model: SimulatedModel, num_requests: int = 9, max_tokens: int = 12) -> float:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [model.make_request(key, TokensPrompt([key] * 20), sampling) for key in range(num_requests)]
    list(model.run(requests))
    return model.clock()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "lockstep"])
@pytest.mark.parametrize("ranks", [(0,), (0, 1), (1, 0), (0, 1, 2), (1, 0, 2)])
def test_replay_of_a_trace_is_its_run(tmp_path, ranks, schedule):
    path = tmp_path / "trace.json"
    layout = {"ranks": ranks, "num_slices": 100_000, "pipeline_schedule": schedule, "max_num_seqs": 4}
    trace = OutputFile(str(path), "--trace")
    model = make_model(random_times(len(ranks), seed=1), len(ranks), trace=trace, **layout)
    seconds = run(model)
    tracks, facts = read_trace(str(path))
    assert facts["num_stages"] == len(ranks) and facts["vocab_size"] == 1000
    source = RecordedTimes(tracks)
    again = make_model(source, len(ranks), **layout)
    first_schedule = 0.009  # nothing is recorded before it
    assert run(again) == pytest.approx(seconds, abs=first_schedule)
    begin, end = working_time(tracks)
    replayed = make_tracks(again.report.workers)
    begin_again, end_again = working_time(replayed)
    assert end_again - begin_again == pytest.approx(end - begin, rel=1e-3)
    for track, track_again in zip(tracks, replayed, strict=True):
        assert step_shapes(track_again) == step_shapes(track)
        assert busy_fraction(track_again, begin_again, end_again) == pytest.approx(
            busy_fraction(track, begin, end), abs=1e-3
        )


def make_trace(*shapes: tuple[int, int]) -> list[Track]:
    """A trace of one stage with steps of so many tokens and decodes, of 1, 2, … seconds."""
    slices, begin = [], 0
    for step_id, (num_tokens, num_decodes) in enumerate(shapes):
        end = begin + (step_id + 1) * 10**9
        bounds = {
            "broadcast": (begin, begin),
            "step": (begin, end),
            "prepare": (begin, begin),
            "run": (begin, end),
            "wait for tokens": (end, end),
        }
        for name, (slice_begin, slice_end) in bounds.items():
            slices.append(
                Slice(
                    name=name,
                    begin=slice_begin,
                    end=slice_end,
                    step_id=step_id,
                    num_tokens=num_tokens,
                    num_decodes=num_decodes,
                )
            )
        begin = end
    return [Track(0, 0, 0, slices)]


def test_plan_that_was_not_recorded_has_the_times_of_the_nearest():
    source = RecordedTimes(make_trace((20, 0), (1, 1), (40, 2)))
    one_decode = make_plan(7)
    assert source.times(one_decode).stages[0].run == pytest.approx(2.0)


def test_trace_without_rank_0_is_refused():
    with pytest.raises(UserError, match="lacks rank 0"):
        RecordedTimes([track._replace(rank=1) for track in make_trace((1, 1))])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no JSON", "is not a trace"),
        ('{"traceEvents": [{"ph": "X", "name": "run", "args": {"step": "x"}}]}', "the slice 'run' at 0 has"),
        (
            '{"traceEvents": [{"ph": "X", "name": "run", "args": {"step": 1, "tokens": 1.5}}]}',
            "the slice 'run' at 0 has",
        ),
        ('{"traceEvents": [{"ph": "X", "name": "run", "ts": 1e308}]}', "the slice 'run' at 1e\\+308 has"),
        ('{"traceEvents": [{"ph": "X", "name": "run", "dur": -1}]}', "lasts -1"),
        ('{"traceEvents": [{"ph": "X", "name": "run", "ts": "x"}]}', "is not a trace"),
        ("{}", "is not a trace"),
        ('{"traceEvents": []}', "no step of any rank"),
        ('{"traceEvents": [{"ph": "X", "name": "run", "pid": 0, "args": {"step": 1}}]}', "no step of any rank"),
    ],
)
def test_file_that_is_no_trace_is_refused(tmp_path, text, expected):
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=expected):
        read_trace(str(path))


def test_missing_trace_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_trace(str(tmp_path / "none.json"))
