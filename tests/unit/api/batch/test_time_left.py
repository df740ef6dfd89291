"""Estimates of a job's remaining time, against the time that a modelled engine then takes."""

from __future__ import annotations

import pytest
from fake_clock import FakeClock

from labinfer.api.batch.time_left import TimeLeft
from labinfer.engine.llm_engine import EngineLoad, RunningAnswer

STEP_SECONDS = 0.025


def run_job(
    lengths: list[int], limits: list[int], slots: int, interval: float, sequences: int = 1
) -> list[tuple[float, float | None]]:
    """(seconds since the start, estimate) of a job whose every step takes ``STEP_SECONDS`` and gives each running answer a token; the last
    item is the end. Each line has ``sequences`` answers."""
    clock = FakeClock(0.0)
    left, estimates, next_time = TimeLeft(clock), [], interval
    waiting, running, done = list(range(len(lengths))), {}, []
    while waiting or running:
        while waiting and (len(running) + 1) * sequences <= slots:
            running[waiting.pop(0)] = 0
        clock.now += STEP_SECONDS
        for line in running:
            running[line] += 1
        for line in [line for line, tokens in running.items() if tokens == lengths[line]]:
            del running[line]
            done.append(line)
        if clock.now >= next_time and (waiting or running):
            next_time += interval
            answers = tuple(
                RunningAnswer(line * sequences + choice, tokens, limits[line])
                for line, tokens in running.items()
                for choice in range(sequences)
            )
            load = EngineLoad(
                num_running=len(answers),
                num_waiting=len(waiting),
                kv_usage=0.5,
                num_running_requests=len(running),
                running_answers=answers,
            )
            estimate = left.estimate(
                num_lines_left=len(waiting) + len(running),
                num_answered=len(done),
                output_tokens=sequences * sum(lengths[line] for line in done),
                allowed_tokens=sequences * sum(limits[line] for line in done),
                generated_tokens=sequences * (sum(lengths[line] for line in done) + sum(running.values())),
                load=load,
            )
            if done:
                estimates.append((clock.now, estimate))
    return [*estimates, (clock.now, 0.0)]


def check(estimates: list[tuple[float, float | None]], least: float, most: float, slack: float = 0.05) -> None:
    """Each estimate is between ``least`` and ``most`` times what the job then took, give or take ``slack`` seconds."""
    *estimates, (end, _) = estimates
    assert estimates
    for time, estimate in estimates:
        assert least * (end - time) - slack <= estimate <= most * (end - time) + slack, (time, end - time, estimate)


@pytest.mark.parametrize("interval", [0.2, 1.0])
def test_one_long_line_among_short_ones_that_use_their_limits(interval):
    """The throughput of nine answers says nothing about the time of the last one, which runs alone."""
    check(run_job([20] * 8 + [800], [20] * 8 + [800], 16, interval), 0.9, 1.1)


def test_one_long_line_among_lines_that_end_early():
    """Nothing tells that it is long but what it has already: at most its limit, and at least as much again until that is near."""
    estimates = run_job([10] * 8 + [800], [1000] * 9, 16, 1.0)
    *estimates, (end, _) = estimates
    for time, estimate in estimates:
        assert estimate >= min(time, end - time) * 0.95, (time, estimate)
        assert estimate <= (1000 * STEP_SECONDS - time) * 1.05


@pytest.mark.parametrize("sequences", [1, 4])
def test_many_lines_of_like_lengths(sequences):
    lengths = [40 + 7 * number % 20 for number in range(300)]
    check(run_job(lengths, [60] * 300, 16 * sequences, 1.0, sequences), 0.9, 1.2, slack=1.0)


def test_lines_that_end_before_their_limits_do_not_make_the_rest_long():
    lengths = [30 + 7 * number % 20 for number in range(300)]
    check(run_job(lengths, [2000] * 300, 16, 1.0), 0.9, 1.2, slack=2.0)


def test_job_without_tokens_has_no_estimate():
    load = EngineLoad(num_running=0, num_waiting=0, kv_usage=0.0, num_running_requests=0, running_answers=())
    clock = FakeClock()
    left = TimeLeft(clock)
    clock.now += 1
    counts = {"output_tokens": 0, "allowed_tokens": 0, "generated_tokens": 0}
    assert left.estimate(num_lines_left=5, num_answered=3, **counts, load=load) is None
