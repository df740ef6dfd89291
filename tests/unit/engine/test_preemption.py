"""Without room: who gives way, who is ended, and that no block is lost or shared on the way."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench
from worker_model import token_at

from labinfer.base.rank_stats import StepTimes
from labinfer.engine.request import FinishReason

SCHEDULES = ("1f1b", "gpipe", "lockstep")
MIX = [(1, 5), (30, 3), (7, 12), (16, 1), (5, 9), (64, 4), (3, 3), (12, 8)]


def test_without_room_a_younger_sequence_is_preempted_and_comes_back():
    bench = Bench(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    for _ in range(3):
        bench.add(7, 9)  # two blocks each at first, four at the end
    bench.finish_all()
    assert bench.scheduler.counts["preemptions"] > 0
    assert [s.num_output_tokens for s in bench.sequences] == [9, 9, 9]
    assert bench.sequences[0].num_preemptions == 0
    assert sum(s.num_preemptions for s in bench.sequences) == bench.scheduler.counts["preemptions"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [17, 20, 30])
def test_with_few_blocks_everything_still_finishes(schedule, num_stages, num_blocks):
    """The longest request (64 + 4 tokens) needs 17 blocks of 4."""
    bench = Bench(num_blocks=num_blocks, num_stages=num_stages, pipeline_schedule=schedule, chunked_prefill_size=8)
    for prompt_tokens, max_tokens in MIX * 3:
        bench.add(prompt_tokens, max_tokens)
    bench.finish_all()
    assert [s.num_output_tokens for s in bench.sequences] == [max_tokens for _, max_tokens in MIX * 3]


def test_youngest_gives_way_first():
    bench = Bench(num_blocks=6, block_size=4)
    for _ in range(3):
        bench.add(7, 9)
    while not bench.scheduler.counts["preemptions"]:
        bench.launch_all()
        bench.update()
    assert [s.num_preemptions for s in bench.sequences] == [0, 0, 1]
    bench.finish_all()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_oldest_running_sequence_is_never_preempted(num_stages):
    bench = Bench(num_blocks=9, block_size=4, num_stages=num_stages)
    for _ in range(8):
        bench.add(6, 20)
    while bench.scheduler.has_work:
        while True:
            before = {s.seq_id: s.num_preemptions for s in bench.scheduler.running}
            if bench.launch() is None:
                break
            if before:
                assert bench.sequences[min(before)].num_preemptions == before[min(before)]
        bench.update()
    assert bench.scheduler.counts["preemptions"] > 0
    bench.check_end()


@pytest.mark.parametrize(
    ("swapped_block", "state", "swaps"), [(3.9, 0.0, True), (4.1, 0.0, False), (3.9, 0.5, False)], ids=str
)
def test_the_cheaper_way_is_taken(swapped_block, state, swaps):
    """A step of 8 tokens takes 8 s, so a token is computed again in 1 s. There are 8 of them in two blocks."""
    times = StepTimes(sizes=[1, 8], by_stage=[[2.0, 8.0]], swapped_block=swapped_block, swapped_state=state)
    bench = Bench(num_blocks=16, num_host_blocks=8, times=times, preemption_mode="auto")
    sequence = bench.add(8, 2)
    bench.launch()
    bench.update()
    bench.scheduler._preempt(sequence)
    assert bench.scheduler.counts["swaps"] == swaps
    bench.finish_all()


def test_preempted_sequence_is_started_anew_with_all_its_tokens():
    bench = Bench(num_blocks=4, block_size=4)
    bench.add(7, 9)
    young = bench.add(7, 9)
    while not young.num_preemptions:
        bench.launch_all()
        bench.update()
    known = list(young.token_ids)
    assert known[7:] == [token_at(1, 7 + index) for index in range(len(known) - 7)] and len(known) > 7
    bench.finish_all()
    starts = [start for plan in bench.plans for start in plan.starts if start.seq_id == young.seq_id]
    assert len(starts) == 1 + young.num_preemptions
    assert starts[1].token_ids == known


# Aborts.


def test_abort_in_flight_frees_the_blocks_at_once_and_drops_the_token():
    bench = Bench(num_stages=2)
    aborted, other = bench.add(9, 5), bench.add(4, 5)
    bench.launch_all()
    bench.scheduler.finish(aborted, FinishReason.ABORT)
    assert bench.blocks.num_free == bench.blocks.num_blocks - 1
    assert bench.update() == [other]
    assert aborted.output_ids == [] and aborted.num_in_flight == 0
    bench.finish_all()
    assert (aborted.finish_reason, other.finish_reason) == (FinishReason.ABORT, FinishReason.LENGTH)


def test_blocks_of_an_aborted_sequence_are_reused_only_after_the_workers_hear_of_it():
    """``WorkerModel`` refuses a block that holds another sequence's tokens; here every block changes hands in flight."""
    bench = Bench(num_blocks=4, num_stages=3)
    first = bench.add(16, 1)
    bench.launch()
    bench.add(16, 1)
    assert bench.launch() is None
    bench.scheduler.finish(first, FinishReason.ABORT)
    assert bench.launch().finished == [0]
    bench.update()
    bench.finish_all()


def test_waiting_sequence_can_be_aborted_without_the_workers_hearing_of_it():
    bench = Bench(max_num_seqs=1)
    bench.add(4, 2)
    bench.launch()
    waiting = bench.add(4, 2)
    bench.scheduler.finish(waiting, FinishReason.ABORT)
    bench.finish_all()
    assert waiting.output_ids == []
    assert all(waiting.seq_id not in plan.finished for plan in bench.plans)


def test_preempted_sequence_can_be_aborted_while_it_waits():
    bench = Bench(num_blocks=4, block_size=4)
    bench.add(7, 9)
    young = bench.add(7, 9)
    while not young.num_preemptions:
        bench.launch_all()
        bench.update()
    bench.scheduler.finish(young, FinishReason.ABORT)
    bench.finish_all()


def test_ending_a_sequence_twice_changes_nothing():
    bench = Bench()
    sequence = bench.add(4, 2)
    bench.finish_all()
    bench.scheduler.finish(sequence, FinishReason.ABORT)
    assert sequence.finish_reason is FinishReason.LENGTH
    bench.check_end()
