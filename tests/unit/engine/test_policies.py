"""Scheduling policies: who is next, who gives way, how the work is split, and what the queue refuses."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace

import pytest
from scheduler_bench import Bench

from labinfer.base.config import BATCH_POLICIES, SCHEDULING_POLICIES
from labinfer.engine.pipeline_schedule import PipelineSchedule
from labinfer.engine.policies import Budget, SchedulerState, balanced, fcfs, greedy, phases, throttle

STATE = SchedulerState(
    num_decoding=10, prefill_tokens=2400, free_fraction=0.9, num_micro_batches=2, max_tokens=512, was_prefilling=False
)


def test_options_name_what_is_registered():
    assert tuple(SCHEDULING_POLICIES) == ("fcfs", "priority", "fair")
    assert tuple(BATCH_POLICIES) == ("auto", "balanced", "throttle", "greedy", "phases")


def test_greedy_takes_all():
    assert greedy(STATE) == Budget(512, 512)


def test_balanced_deals_decodes_only():
    assert balanced(STATE) == Budget(5, 512)


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, Budget(5, 300)),
        ({"num_decoding": 11}, Budget(6, 300)),
        ({"num_micro_batches": 4}, Budget(3, 150)),
        ({"free_fraction": 0.25}, Budget(5, 150)),
        ({"free_fraction": 0.0}, Budget(5, 128)),
        ({"prefill_tokens": 600}, Budget(5, 128)),
        ({"prefill_tokens": 3}, Budget(5, 128)),
    ],
)
def test_throttle_deals_evenly_over_four_turns_and_slows_prompts_when_the_cache_fills(changes, budget):
    assert throttle(replace(STATE, **changes)) == budget


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, Budget(0, 512)),
        ({"free_fraction": 0.4}, Budget(5, 0)),
        ({"free_fraction": 0.4, "was_prefilling": True}, Budget(0, 512)),
        ({"free_fraction": 0.05, "was_prefilling": True}, Budget(5, 0)),
        ({"prefill_tokens": 0}, Budget(5, 0)),
        ({"free_fraction": 0.05, "num_decoding": 0}, Budget(0, 512)),
    ],
)
def test_phases_change_when_the_cache_is_full_and_when_half_is_free(changes, budget):
    assert phases(replace(STATE, **changes)) == budget


def admitted(bench: Bench) -> list[int]:
    """Sequence ids in the order in which they start."""
    bench.finish_all()
    started = [start.seq_id for plan in bench.plans for start in plan.starts]
    return list(dict.fromkeys(started))


def test_first_come_first_served():
    bench = Bench(max_num_seqs=1)
    for value in (3, 1, 2):
        bench.add(4, 2, priority=value, user=str(value))
    assert admitted(bench) == [0, 1, 2]


def test_lowest_priority_goes_first():
    bench = Bench(max_num_seqs=1, scheduling_policy="priority")
    for value in (3, 1, 2, 1, -5):
        bench.add(4, 2, priority=value)
    assert admitted(bench) == [4, 1, 3, 2, 0]


def test_users_take_turns():
    bench = Bench(max_num_seqs=2, scheduling_policy="fair")
    for user in "aaaaabb":
        bench.add(4, 3, user=user)
    assert admitted(bench)[:4] == [0, 5, 1, 6]


def test_lowest_priority_keeps_its_blocks():
    bench = Bench(num_blocks=6, block_size=4, scheduling_policy="priority")
    for value in (2, 1, 0):
        bench.add(7, 9, priority=value)
    bench.finish_all()
    assert bench.scheduler.counts["preemptions"] > 0
    assert bench.sequences[2].num_preemptions == 0


@pytest.mark.pairwise
@pytest.mark.parametrize("order", SCHEDULING_POLICIES)
@pytest.mark.parametrize("split", BATCH_POLICIES)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [17, 40])
def test_under_every_policy_everything_finishes(order, split, num_stages, num_blocks):
    bench = Bench(
        num_blocks=num_blocks,
        num_stages=num_stages,
        scheduling_policy=order,
        batch_policy=split,
        chunked_prefill_size=8,
    )
    for index, (prompt_tokens, max_tokens) in enumerate([(1, 5), (30, 3), (7, 12), (16, 1), (5, 9), (64, 4)] * 3):
        bench.add(prompt_tokens, max_tokens, shared=prompt_tokens // 2, priority=index % 3, user=str(index % 4))
    bench.finish_all()


def test_throttle_gives_every_micro_batch_its_share_and_greedy_does_not():
    sizes = {}
    for split in ("greedy", "throttle"):
        bench = Bench(num_blocks=512, num_stages=2, batch_policy=split)
        for _ in range(8):
            bench.add(1, 20)
        for _ in range(6):
            bench.launch_all()
            bench.update()
        sizes[split] = sorted(len(plan.entries) for plan in list(bench.plans)[-4:])
        bench.finish_all()
    assert sizes["throttle"] == [4, 4, 4, 4]
    assert sizes["greedy"] != [4, 4, 4, 4]


def bubble_of_two_stages(split: str) -> float:
    """Prompts of 400 tokens arrive among answers, on a clock where a micro-batch takes a stage 10 ms and 1 ms a token."""
    bench = Bench(num_blocks=2048, num_stages=2, batch_policy=split)
    for _ in range(8):
        bench.add(4, 60)
    due = deque(range(500, 5500, 1000))
    now = second_is_free = busy = 0
    returns: deque[int] = deque()
    while due or bench.scheduler.has_work:
        while due and due[0] <= now:
            due.popleft()
            bench.add(400, 20)
        while (plan := bench.launch()) is not None:
            cost = 10 + plan.num_tokens
            busy += 2 * cost
            now += cost  # the first stage's rank schedules when it is done
            second_is_free = max(now, second_is_free) + cost
            returns.append(second_is_free)
        now = max(now, returns.popleft())
        bench.update()
    bench.finish_all()
    return 1 - busy / 2 / now


def test_prompts_among_answers_leave_less_of_the_pipeline_empty_under_throttle():
    bubbles = {split: bubble_of_two_stages(split) for split in ("greedy", "balanced", "throttle")}
    assert bubbles["throttle"] < 0.7 * bubbles["balanced"] <= 0.7 * bubbles["greedy"], bubbles


@pytest.mark.parametrize("split", BATCH_POLICIES)
def test_with_more_waiting_than_may_run_the_pipeline_stays_full(split):
    if split == "greedy":
        return  # that it does not is its point
    bench = Bench(num_blocks=512, num_stages=4, batch_policy=split, max_num_seqs=16)
    for _ in range(48):
        bench.add(6, 20)
    depths = []
    while bench.scheduler.waiting:
        bench.launch_all()
        depths.append(len(bench.scheduler.in_flight))
        bench.update()
    bench.finish_all()
    assert statistics.median(depths) == 4


def test_queue_has_room_for_so_many_and_no_more():
    bench = Bench(max_num_seqs=1, max_queued_requests=2)
    assert bench.scheduler.has_room(2) and not bench.scheduler.has_room(3)
    bench.add(4, 2)
    assert bench.scheduler.has_room(1) and not bench.scheduler.has_room(2)
    bench.launch()
    assert bench.scheduler.has_room(2)
    bench.finish_all()
    assert Bench().scheduler.has_room(10**6)


def test_step_is_told_in_one_line():
    bench = Bench()
    bench.add(9, 3)
    line = bench.scheduler.describe(bench.launch())
    assert line == "step 0: 9 tokens (0 decodes, 1 chunks), 1 running, 0 waiting, 61 blocks free, 0 preempted"
    bench.finish_all()


def fewest_tokens_first(sequence, running_of_user):
    """Breaks the contract: the key grows with every generated token."""
    return (sequence.num_output_tokens, sequence.order)


def test_policy_whose_sort_key_changes_is_named(add_part):
    add_part("scheduling_policy", "fewest", fewest_tokens_first)
    bench = Bench(num_blocks=6, scheduling_policy="fewest")
    for _ in range(3):
        bench.add(4, 12)
    with pytest.raises(AssertionError, match="'fewest_tokens_first' gave request 0 the sort key"):
        bench.finish_all()


def test_policy_by_a_constant_of_the_request(add_part):
    def longest_prompt_first(sequence, running_of_user):
        return (-sequence.num_prompt_tokens, sequence.order)

    add_part("scheduling_policy", "longest", longest_prompt_first)
    bench = Bench(num_blocks=6, max_num_seqs=2, scheduling_policy="longest")
    for num_tokens in (2, 4, 3):
        bench.add(num_tokens, 8)
    assert admitted(bench) == [1, 2, 0]


def test_order_of_prompts_may_change_while_that_of_preemptions_stays(add_part):
    """The longest prompt goes on first until its last chunk, which waits for all others; preempted is the last to come."""

    def most_left_then_last(sequence, running_of_user):
        return (sequence.num_unscheduled <= 4, -sequence.num_unscheduled, sequence.order)

    add_part("scheduling_policy", "erratic", fcfs, prefill_key=most_left_then_last)
    bench = Bench(num_blocks=12, scheduling_policy="erratic", chunked_prefill_size=4, max_num_batched_tokens=4)
    for num_tokens in (8, 12, 20):
        bench.add(num_tokens, 12)
    bench.launch()
    assert [(entry.seq_id, entry.num_tokens) for entry in bench.plans[0].entries] == [(2, 4)]
    while not bench.scheduler.counts["preemptions"]:
        bench.launch_all()
        bench.update()
    chunks = [entry.seq_id for plan in bench.plans for entry in plan.entries if not entry.is_decode]
    assert chunks[:8] == [2, 2, 1, 2, 0, 1, 2, 0], chunks
    assert bench.sequences[2].num_preemptions == 1
    bench.finish_all()


def test_waiting_prompts_count_if_the_next_one_by_its_changing_key_has_room(add_part):
    """Prompts of ``phases`` would else wait for the end of all answers behind a long prompt that has no room."""
    add_part("scheduling_policy", "short", fcfs, prefill_key=lambda sequence, _: (sequence.num_unscheduled,))
    bench = Bench(num_blocks=20, scheduling_policy="short", batch_policy="phases")
    bench.add(8, 20)
    bench.launch_all()
    bench.add(76, 2)
    bench.add(4, 2)
    bench.update()
    bench.launch()
    assert [start.seq_id for start in bench.plans[-1].starts] == [2]
    bench.finish_all()


def test_scheduler_that_nothing_can_start_says_so(monkeypatch):
    bench = Bench(num_blocks=6)
    bench.add(4, 12)
    monkeypatch.setattr(bench.scheduler, "_compose", lambda policy: {})
    with pytest.raises(
        AssertionError, match="the scheduler is stuck, with no micro-batch in flight: 0 sequences run and 1 wait"
    ):
        bench.scheduler.schedule()


def test_schedule_that_starts_nothing_is_named(add_part):
    class Stuck(PipelineSchedule):
        def may_launch(self, in_flight, target):
            return False

    add_part("pipeline_schedule", "stuck", Stuck)
    bench = Bench(pipeline_schedule="stuck")
    bench.add(4, 2)
    with pytest.raises(
        AssertionError, match="the pipeline schedule Stuck starts no micro-batch although none is in flight"
    ):
        bench.launch()


def test_batch_policy_that_gives_no_budget_is_named(add_part):
    add_part("batch_policy", "empty", lambda state: None)
    bench = Bench(batch_policy="empty")
    bench.add(4, 2)
    with pytest.raises(AssertionError, match="the batch policy '<lambda>' gave None"):
        bench.launch()
