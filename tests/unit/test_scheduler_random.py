"""Random orders of arrivals, launches, results and aborts: whatever happens, plans stay consistent deltas."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_model import Bench

from labinfer.config import BATCH_POLICIES, SCHEDULING_POLICIES
from labinfer.engine.sequence import FinishReason

NUM_BLOCKS, BLOCK_SIZE = 10, 3
LONGEST = NUM_BLOCKS * BLOCK_SIZE  # what the engine's context limit guarantees


@st.composite
def lengths(draw) -> tuple[int, int, int]:
    prompt_tokens = draw(st.one_of(st.integers(1, 8), st.integers(1, LONGEST - 1)))
    shared = draw(st.one_of(st.just(0), st.integers(0, prompt_tokens)))
    return prompt_tokens, draw(st.integers(1, min(20, LONGEST - prompt_tokens))), shared


ADD = st.tuples(st.just("add"), lengths())
LAUNCH, UPDATE, STEP = (st.just((kind, None)) for kind in ("launch", "update", "step"))
ABORT = st.tuples(st.just("abort"), st.integers(0, 30))
EVENTS = st.lists(st.one_of(ADD, LAUNCH, LAUNCH, LAUNCH, UPDATE, UPDATE, STEP, STEP, ABORT), max_size=100)
SHAPES = st.fixed_dictionaries(
    {
        "num_stages": st.integers(1, 4),
        "pipeline_schedule": st.sampled_from(["1f1b", "gpipe", "lockstep"]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 24),
        "chunked_prefill_size": st.integers(1, 16),
        "eos": st.sampled_from([(), tuple(range(0, 1000, 5))]),
        "scheduling_policy": st.sampled_from(SCHEDULING_POLICIES),
        "batch_policy": st.sampled_from(BATCH_POLICIES),
    }
)


@settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES, events=EVENTS)
def test_any_order_of_events_keeps_plans_consistent(shape, events):
    """``Bench`` and its ``WorkerModel`` check every plan; here only the order is left to chance."""
    bench = Bench(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **shape)
    aborted = set()
    for kind, value in events:
        if kind == "add":
            bench.add(*value, priority=value[0] % 3, user=str(value[1] % 3))
        elif kind == "launch":
            bench.launch()
        elif kind == "step":
            bench.launch_all()
        if kind in ("update", "step") and bench.results:
            before = {s.seq_id: s.num_output_tokens for s in bench.sequences}
            for sequence in bench.update():
                assert sequence.num_output_tokens == before[sequence.seq_id] + 1
                assert sequence.finish_reason is not FinishReason.ABORT
        if kind == "abort" and value < len(bench.sequences):
            sequence = bench.sequences[value]
            if sequence.finish_reason is None:
                aborted.add(value)
            bench.scheduler.finish(sequence, FinishReason.ABORT)
            bench.blocks.check_integrity()
    bench.finish_all()
    for sequence in bench.sequences:
        assert (sequence.finish_reason is FinishReason.ABORT) == (sequence.seq_id in aborted)
        if sequence.finish_reason is FinishReason.STOP:
            assert sequence.output_ids[-1] % 5 == 0 and shape["eos"]
        if sequence.finish_reason is not FinishReason.ABORT and shape["eos"]:
            assert all(token % 5 for token in sequence.output_ids[:-1])
