"""Chunks of drafted tokens behind those on their way: what runs, what becomes stale, and that no answer depends on it."""

from __future__ import annotations

import random

import pytest
from scheduler_bench import Bench, FixedProposer, ListGuide, RandomProposer
from worker_model import token_at

from labinfer.base.rank_stats import StepTimes
from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.draft_lengths import DraftLengths
from labinfer.engine.guide import allows
from labinfer.engine.request import FinishReason
from labinfer.engine.sequence import Sequence


def run_one_launch_a_result(bench: Bench) -> int:
    """Run to the end as a pipeline does; returns the micro-batches on their way at once, at most."""
    most = 0
    while bench.scheduler.has_work:
        bench.launch_all()
        most = max(most, len(bench.results))
        bench.update()
    bench.check_end()
    return most


@pytest.mark.parametrize(
    ("num_stages", "continuous", "is_one_cpu_host", "expected"),
    [(1, True, False, 1), (4, False, False, 1), (4, True, True, 4), (4, None, False, 4), (4, None, True, 1)],
)
def test_idle_stages_run_what_follows_if_tokens_on_their_way_are_right(
    num_stages, continuous, is_one_cpu_host, expected
):
    config = SpeculativeOptions(num_speculative_tokens=3, continuous=continuous)
    bench = Bench(
        num_stages=num_stages, proposer=FixedProposer(3), speculative_config=config, is_one_cpu_host=is_one_cpu_host
    )
    sequence = bench.add(5, 40)
    assert run_one_launch_a_result(bench) == expected
    assert sequence.num_output_tokens == 40
    counts = bench.scheduler.counts
    assert counts["drafted"] == counts["accepted"] and (counts["continued"] > 0) == (expected > 1)
    begins = [entry.begin for plan in bench.plans for entry in plan.entries]
    assert begins == sorted(begins) and len(set(begins)) == len(begins)  # each token is run once


def test_chunks_behind_a_wrong_token_do_not_count():
    bench = Bench(num_stages=4, proposer=FixedProposer(3, lambda index: index != 6))
    sequence = bench.add(5, 12)
    bench.launch_all()
    prompt, *behind = bench.plans
    assert [(entry.begin, entry.num_samples) for plan in behind for entry in plan.entries] == [(5, 3), (8, 3), (11, 3)]
    bench.update()
    assert (sequence.output_ids, sequence.num_results_to_discard) == ([token_at(0, 5)], 0)
    bench.update()  # the token at 5 was guessed right, the one at 6 was not
    assert (sequence.output_ids, sequence.num_results_to_discard, sequence.draft) == (
        [token_at(0, 5), token_at(0, 6)],
        2,
        (),
    )
    again = bench.launch()
    assert again.entries[0].new_tokens == tuple(token_at(0, index) for index in range(6, 10))
    assert bench.update() == bench.update() == [] and sequence.num_results_to_discard == 0
    bench.finish_all()
    assert sequence.num_output_tokens == 12
    assert (
        bench.scheduler.counts["drafted"] - bench.scheduler.counts["accepted"] == 8
    )  # all that were sent at first but one


def test_sequence_is_not_preempted_while_stale_chunks_are_on_their_way():
    bench = Bench(num_blocks=8, block_size=4, num_stages=4, proposer=FixedProposer(3, lambda index: False))
    first = bench.add(5, 20)
    for _ in range(4):
        bench.launch_all()
        bench.update()
    assert first.num_results_to_discard or first.num_in_flight > 1
    bench.add(5, 20)
    bench.finish_all()  # looks at all tokens; ``launch`` at preemptions
    assert bench.num_behind > 5


def test_prompts_and_other_sequences_come_before_chunks_behind_others():
    bench = Bench(num_stages=3, proposer=FixedProposer(2))
    bench.add(5, 30)
    bench.launch_all()
    assert [plan.entries[0].seq_id for plan in bench.plans] == [0, 0, 0]
    bench.add(5, 30)
    bench.update()
    bench.launch_all()
    assert bench.plans[-1].starts[0].seq_id == 1
    bench.finish_all()


def test_sequences_with_fewest_chunks_on_their_way_come_first():
    bench = Bench(num_stages=4, num_blocks=200, proposer=FixedProposer(2), max_num_batched_tokens=16)
    first, second = bench.add(5, 60), bench.add(5, 60)
    most = 0
    while first.finish_reason is None and second.finish_reason is None:
        bench.launch_all()
        if first.num_output_tokens and second.num_output_tokens:
            most = max(most, abs(first.num_in_flight - second.num_in_flight))
        bench.update()
    assert bench.num_behind > 10 and most <= 2
    bench.finish_all()


class FailingProposer(FixedProposer):
    """Raises once it is asked what comes behind tokens that are on their way."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        if sequences[0].num_output_tokens > 20 and sequences[0].num_unverified:
            raise ArithmeticError("no guess")
        return super().propose(sequences, limits)


def test_proposer_that_fails_behind_others_leaves_sequences_as_they_were():
    bench = Bench(num_stages=4, proposer=FailingProposer(3))
    sequence = bench.add(5, 40)
    while bench.scheduler.drafts.proposer is not None:
        bench.launch_all()
        assert sequence.num_unverified == 0 and len(sequence.token_ids) == 5 + sequence.num_output_tokens
        bench.update()
    bench.finish_all()
    assert sequence.num_output_tokens == 40 and bench.scheduler.counts["continued"] > 0


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_masks_of_chunks_behind_others_are_those_of_their_places(share, num_stages):
    form = [token_at(0, index) for index in range(5, 35)]
    guide = ListGuide(form)
    bench = Bench(num_stages=num_stages, proposer=RandomProposer(random.Random(3), share))
    sequence = bench.add(5, 50, guide=guide)
    while bench.scheduler.has_work:
        for plan in bench.launch_all():
            for entry in plan.entries:
                assert len(entry.masks) == entry.num_samples
                end = entry.begin + entry.num_tokens - 5  # tokens of the answer before the last sample
                for offset, mask in enumerate(entry.masks, end + 1 - entry.num_samples):
                    assert allows(mask, form[offset])
        assert guide.tokens == sequence.output_ids
        bench.update()
    bench.check_end()
    assert (sequence.output_ids, sequence.finish_reason) == (form, FinishReason.STOP)
    assert bench.num_behind > 0 or share == 0.0


def test_layers_with_a_state_have_one_chunk():
    bench = Bench(num_stages=4, num_states=6, proposer=FixedProposer(3))
    bench.add(5, 30)
    bench.finish_all()
    assert bench.scheduler.counts["accepted"] > 0 == bench.num_behind


FLAT = StepTimes(sizes=[1, 8], by_stage=[[1.0, 1.1]] * 4, hop=1.0)
"""Rows cost next to nothing."""
UNEVEN = StepTimes(sizes=[1, 8], by_stage=[[0.1, 0.1], [8.0, 8.0], [0.1, 0.1], [0.1, 0.1]])
"""One stage takes all the time: another micro-batch waits for it."""


def run_with_times(times: StepTimes, num_sequences: int, share: float = 0.95) -> Bench:
    bench = Bench(
        num_blocks=2000,
        num_stages=4,
        times=times,
        proposer=RandomProposer(random.Random(0), share, full=True),
        speculative_config=SpeculativeOptions(),
    )
    for _ in range(num_sequences):
        bench.add(3, 100)
    bench.finish_all()
    return bench


def test_chunks_go_behind_others_where_stages_are_idle_and_guesses_good():
    bench = run_with_times(FLAT, 1)
    counts = bench.scheduler.counts
    assert counts["continued"] > counts["drafts"] / 3 and counts["saved_seconds"] > 0


@pytest.mark.parametrize(
    ("times", "num_sequences", "share", "most"),
    [(UNEVEN, 1, 0.95, 1), (FLAT, 1, 0.0, 1), (FLAT, 32, 0.95, 7)],
    ids=["uneven", "bad", "many"],
)
def test_hardly_any_chunk_goes_behind_others_where_it_gives_nothing(times, num_sequences, share, most):
    """Before anything was measured, or at the end, where few sequences are left."""
    bench = run_with_times(times, num_sequences, share)
    assert bench.num_behind <= most


def no_seconds(num_micro_batches: int, num_drafted: int) -> float:
    """A spare rank only drafts: it runs no steps."""
    return 0.0


def test_chunk_is_worth_the_chance_that_all_before_it_is_right():
    bench = Bench(num_stages=4)
    sequence, lengths = bench.add(3, 30), DraftLengths(max_length=8)
    for _ in range(40):
        lengths.add_verified(sequence, range(8), 7)

    def seconds(num_micro_batches: int, num_drafted: int) -> float:
        return 1.0 + 0.02 * num_drafted + 0.03 * num_micro_batches

    chosen = []
    for count in range(0, 60, 4):
        sequence.draft_positions = tuple(range(8)) * (count // 8) + tuple(range(count % 8))
        chosen.append(lengths.choose_further_chunks({sequence: 8}, [], seconds, no_seconds, 1).get(sequence, 0))
    assert chosen[0] == 8 and chosen[-1] == 0
    assert chosen == sorted(chosen, reverse=True)
    assert (
        lengths.choose_further_chunks({sequence: 8}, [], lambda count, num_drafted: float(count), no_seconds, 1) == {}
    )


@pytest.mark.parametrize(
    ("step", "before", "count", "expected"),
    [(0.1, 8, 1, 8), (3.9, 8, 1, 0), (0.1, 2, 1, 8), (3.0, 2, 2, 8), (3.9, 8, 2, 0)],
)
def test_the_steps_of_the_rank_that_drafts_wait_for_its_drafts(step, before, count, expected):
    """A round takes 4 s, and a draft 0.2 s a token: further ones are worth it where the rank that drafts has time beside its steps."""
    bench = Bench(num_stages=4)
    sequence, lengths = bench.add(3, 30), DraftLengths(max_length=8)
    for _ in range(40):
        lengths.add_verified(sequence, range(8), 8)
    lengths.add_draft_time(1.6, 8)
    sequence.draft_positions = tuple(range(before)) * count
    behind = lengths.choose_further_chunks({sequence: 8}, [], lambda *_: 4.0, lambda *_: step, count)
    assert behind.get(sequence, 0) == expected
