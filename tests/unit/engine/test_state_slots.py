"""States of sequences: who gets a slot, where snapshots are taken, and what the prefix cache makes of them."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from labinfer.base.plan import NO_SLOT
from labinfer.engine.state_slots import StateSlots


def bench(num_states: int = 4, **options) -> Bench:
    """Blocks of 4 tokens, and a snapshot every 12."""
    return Bench(num_blocks=32, num_states=num_states, max_num_batched_tokens=64, chunked_prefill_size=64, **options)


def moves(bench: Bench, kind: str) -> list:
    return [move for plan in bench.plans for move in plan.moves if move.kind == kind]


def test_sequences_hold_a_slot_each_until_they_end():
    one = bench()
    first, second = one.add(5, 3), one.add(6, 3)
    one.launch()
    slots = {first.cache.state_slot, second.cache.state_slot}
    assert len(slots) == 2 and None not in slots
    assert {start.state_slot for start in one.plans[0].starts} == slots
    one.finish_all()
    assert one.tables.states.slots.num_free == 4


def test_models_without_states_name_no_slot():
    one = Bench()
    one.add(5, 2)
    one.finish_all()
    assert [start.state_slot for plan in one.plans for start in plan.starts] == [NO_SLOT]


def test_sequences_wait_where_no_slot_is_free():
    one = bench(num_states=1)
    one.add(5, 3), one.add(6, 3)
    one.launch()
    assert len(one.scheduler.running) == 1
    one.finish_all()
    assert all(sequence.num_output_tokens == 3 for sequence in one.sequences)


def test_chunks_end_where_snapshots_are_taken():
    """After 12 and 24 tokens, and where the last full block before the prompt's end ends."""
    one = bench()
    one.add(31, 1)
    one.finish_all()
    ends = [entry.begin + entry.num_tokens for plan in one.plans for entry in plan.entries]
    assert ends == [12, 24, 28, 31]
    assert len(moves(one, "copy_state")) == 3


@pytest.mark.parametrize(("shared", "found"), [(27, 24), (28, 28), (23, 12), (11, 0)])
def test_prefix_is_found_up_to_its_deepest_snapshot(shared, found):
    one = bench()
    one.add(31, 3, shared=shared)
    one.finish_all()
    sequence = one.add(31, 3, shared=shared)
    one.finish_all()  # the worker model asserts that every state is that of the tokens before
    assert sequence.num_cached_tokens == found


def test_without_prefix_caching_nothing_is_copied():
    one = bench()
    one.tables.blocks.prefix_caching = False
    one.add(31, 3)
    one.finish_all()
    assert len(one.plans[0].entries[0].new_blocks) and not moves(one, "copy_state")


def test_states_are_swapped_with_their_blocks():
    one = bench(num_host_blocks=32, num_host_states=2, preemption_mode="swap")
    first, second = one.add(20, 30), one.add(20, 30)
    for _ in range(4):
        one.launch_all()
        one.update()
    one.scheduler._preempt(second)
    assert second.cache.state_slot is None and second.cache.host_state_slot is not None
    one.finish_all()
    assert len(moves(one, "swap_out_state")) == len(moves(one, "swap_in_state")) == 1
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)


def test_without_a_host_slot_a_sequence_is_computed_again():
    one = bench(num_host_blocks=32, num_host_states=0, preemption_mode="swap")
    one.add(20, 30)
    one.launch_all()
    one.update()
    one.scheduler._preempt(one.sequences[0])
    one.finish_all()
    assert not moves(one, "swap_out") and one.sequences[0].num_output_tokens == 30


@pytest.mark.parametrize("num_states", [3, 4, 8])
def test_beams_copy_the_state_they_go_on_from(num_states):
    one = bench(num_states=num_states)
    one.add(10, 12, num_beams=3)
    one.finish_all()


def test_snapshots_make_room_for_sequences():
    states = StateSlots(3)
    (first, _), snapshot = states.take(None), states.snapshot(b"a")
    assert first != snapshot and states.num_restorable([b"x", b"a"]) == 2
    assert states.snapshot(b"a") is None  # it is there
    second, copied = states.take(b"a")
    assert copied == snapshot and len({first, second, snapshot}) == 3
    assert states.num_restorable([b"a"]) == 1
    assert states.take(b"a") == (snapshot, None)  # the last slot that is free, and what is in it
    assert states.take(None) is None and states.snapshot(b"b") is None


def test_sequence_goes_on_in_the_slot_of_a_snapshot_where_no_other_is_free():
    """The worker model asserts that the state is that of the tokens before."""
    one = bench(num_states=2)
    one.add(31, 1, shared=31)
    one.finish_all()
    one.add(2, 60)
    one.launch()
    last = one.add(31, 3, shared=31)
    one.finish_all()
    assert last.num_cached_tokens == 28
