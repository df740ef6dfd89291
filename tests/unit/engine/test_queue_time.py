"""How long a request waited before it was first run: told once, with what it gets first."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench


def updates(bench: Bench) -> dict[int, list[float | None]]:
    """What each sequence says of its wait in each of its updates, as a step takes a second."""
    said: dict[int, list[float | None]] = {}
    while bench.scheduler.has_work:
        bench.launch_all()
        bench.clock.now += 1.0
        for sequence in bench.update():
            said.setdefault(sequence.seq_id, []).append(bench.updates[sequence.seq_id][-1].queue_seconds)
    return said


def test_those_that_find_a_seat_did_not_wait_and_the_others_say_how_long():
    bench = Bench(max_num_seqs=2)
    for _ in range(3):
        bench.add(4, 3)
    bench.clock.now = 0.5  # none has been looked at yet
    assert updates(bench) == {0: [0.5, None, None], 1: [0.5, None, None], 2: [3.5, None, None]}


@pytest.mark.parametrize("fields", [{"pooling": "mean"}, {"num_beams": 2}])
def test_what_brings_all_at_its_end_says_it_then(fields):
    bench = Bench(max_num_seqs=2)
    bench.add(4, 2)
    bench.add(4, 2)
    last = bench.add(4, 2, **fields).seq_id
    assert [seconds for seconds in updates(bench)[last] if seconds is not None] == [2.0]


def test_preemption_is_no_second_wait():
    bench = Bench(num_blocks=6, block_size=4)
    for _ in range(3):
        bench.add(4, 12)
    said = updates(bench)
    assert bench.scheduler.counts["preemptions"] > 0
    for sequence in bench.sequences:
        first, *rest = said[sequence.seq_id]
        assert first <= 2.0 and not any(rest)
