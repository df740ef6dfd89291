"""A state machine of arrivals, launches, results and aborts in any order: plans stay consistent, nothing is leaked."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_bench import Bench, RandomProposer

from labinfer.base.config import BATCH_POLICIES, PREEMPTION_MODES, SCHEDULING_POLICIES
from labinfer.base.rank_stats import StepTimes
from labinfer.base.speculative_options import SpeculativeOptions
from labinfer.engine.cache_capacity import SlidingWindow
from labinfer.engine.eviction import Eviction
from labinfer.engine.policies import fcfs
from labinfer.engine.request import FinishReason

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 10, 3, 6
ROOM = NUM_BLOCKS * BLOCK_SIZE

PROMPTS = st.one_of(st.integers(1, 8), st.integers(1, ROOM))
FAST_SWAP = StepTimes(sizes=[1, 8], by_stage=[[1.0, 1.2]] * 4, hop=0.3, swapped_block=0.2)
"""Cheaper than computing for two tokens or more in a block, dearer for one."""
SHAPES = st.fixed_dictionaries(
    {
        "num_stages": st.integers(1, 4),
        "pipeline_schedule": st.sampled_from(["1f1b", "gpipe", "lockstep"]),
        "max_inflight": st.integers(0, 5),
        "max_num_seqs": st.integers(1, MAX_NUM_SEQS),
        "max_num_batched_tokens": st.integers(1, 24),
        "chunked_prefill_size": st.integers(1, 16),
        "eos": st.sampled_from([(), tuple(range(0, 1000, 5)), (3,)]),
        "scheduling_policy": st.sampled_from([*SCHEDULING_POLICIES, "erratic"]),
        "batch_policy": st.sampled_from(BATCH_POLICIES),
        "preemption_mode": st.sampled_from(PREEMPTION_MODES),
        "num_host_blocks": st.sampled_from([0, 3, 10]),
        "times": st.sampled_from([None, FAST_SWAP]),
        "max_context": st.sampled_from([ROOM, 16, 9]),
        "context_shift": st.booleans(),
        "keep": st.sampled_from([0, 2]),
        "drafts": st.sampled_from([None, None, 0.0, 0.8, 1.0]),
        "prefix_cache_eviction": st.sampled_from(["lru", "erratic"]),
        "num_states": st.sampled_from([0, 0, 1, 2, 3, 5, 8, 30]),
        "num_host_states": st.sampled_from([0, 1, 2, 6]),
        "snapshot_interval": st.sampled_from([1, 3 * BLOCK_SIZE, ROOM]),
        "window": st.sampled_from([0, 0, 1, 2, 4, 5, 11]),
        "spare_window_blocks": st.sampled_from([0, 1, 8]),
        "num_host_window_blocks": st.sampled_from([0, 2, 8]),
    }
)


def erratic(sequence, running_of_user):
    """Prompts overtake each other after every chunk, as differently as can be."""
    counted = 7 * sequence.seq_id + 3 * sequence.num_scheduled + running_of_user.get(sequence.request.user, 0)
    return (counted % 5, sequence.order)


class ErraticEviction(Eviction):
    """Checks the calls against the contract, and evicts neither old blocks nor young ones."""

    def __init__(self):
        self.blocks = []

    def add(self, blocks):
        assert blocks and not set(blocks) & set(self.blocks)
        self.blocks += blocks

    def use(self, blocks):
        self.blocks = [block for block in self.blocks if block not in blocks]

    def evict(self):
        return self.blocks.pop(len(self.blocks) // 2)

    def forget(self, block):
        assert block not in self.blocks


class SchedulerMachine(RuleBasedStateMachine):
    """``Bench`` and its ``WorkerModel`` check every plan; here only the order is left to chance."""

    @initialize(shape=SHAPES)
    def start(self, shape):
        self.shape = shape = dict(shape)
        share = shape.pop("drafts")
        if shape["num_states"]:  # the engine refuses the two together
            shape["context_shift"] = False
        spare, chunk = (
            shape.pop("spare_window_blocks"),
            min(shape["chunked_prefill_size"], shape["max_num_batched_tokens"]),
        )
        if shape["window"]:
            kept = shape["keep"] if shape["context_shift"] else None
            shape["num_window_blocks"] = spare + SlidingWindow(shape["window"], BLOCK_SIZE).least_blocks(chunk, kept)
        self.proposer = None if share is None else RandomProposer(random.Random(0), share)
        self.bench = Bench(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, proposer=self.proposer, **shape)
        self.aborted = set()

    @rule(
        prompt_tokens=PROMPTS,
        max_tokens=st.integers(1, 40),
        shared=st.integers(0, ROOM),
        beams=st.integers(1, 4),
        pooling=st.sampled_from(["", "", "", "last", "mean"]),
    )
    def add(self, prompt_tokens, max_tokens, shared, beams, pooling):
        """Only what the engine would not refuse."""
        context = self.shape["max_context"]
        prompt_tokens = min(prompt_tokens, context if pooling else context - 1)
        if not self.shape["context_shift"]:
            max_tokens = min(max_tokens, context - prompt_tokens)
        longest = min(context, prompt_tokens + max_tokens)
        beams = min(beams, self.shape["num_states"] or beams)
        beams = min(beams, self.shape["max_num_seqs"], NUM_BLOCKS // -(-longest // BLOCK_SIZE))
        windows, shifted = self.bench.tables.windows, self.bench.scheduler.shifted(context)[1]
        keeps = self.shape["context_shift"] and windows is not None and not windows.fits_in(context - shifted)
        while windows is not None and beams > 1:
            if windows.blocks_for_beams(beams, longest, keeps) <= windows.blocks.num_blocks:
                break
            beams -= 1
        if (
            pooling or len(self.shape["eos"]) > 1
        ):  # a search looks at more tokens than the model has if there are many ends
            beams = 1
        self.bench.add(
            prompt_tokens,
            max_tokens,
            min(shared, prompt_tokens),
            num_beams=beams,
            priority=prompt_tokens % 3,
            user=str(max_tokens % 3),
            pooling=pooling,
        )

    @rule()
    def launch(self):
        self.bench.launch()

    @rule()
    def launch_all(self):
        self.bench.launch_all()

    @precondition(lambda self: self.bench.results)
    @rule()
    def update(self):
        before = {s.seq_id: s.num_output_tokens for s in self.bench.sequences}
        for sequence in self.bench.update():
            gained = sequence.num_output_tokens - before[sequence.seq_id]
            most = 0 if sequence.request.pooling else 1 if self.proposer is None else self.shape["chunked_prefill_size"]
            assert sequence.group or min(1, most) <= gained <= most
            assert (sequence.embedding is not None) == bool(sequence.request.pooling)
            assert sequence.finish_reason is not FinishReason.ABORT

    @precondition(lambda self: self.bench.sequences)
    @rule(draw=st.integers(0, 1000))
    def abort(self, draw):
        sequence = self.bench.sequences[draw % len(self.bench.sequences)]
        if sequence.finish_reason is None:
            self.aborted |= {m.seq_id for m in (sequence.group.members if sequence.group else [sequence])}
        self.bench.scheduler.finish(sequence, FinishReason.ABORT)

    @invariant()
    def every_block_has_its_holders(self):
        self.bench.scheduler.check_integrity()
        tables = self.bench.tables
        for part in (tables, tables.windows, tables.states):
            pool = part and (part.slots if part is tables.states else part.blocks)
            if pool and self.shape["prefix_cache_eviction"] == "erratic":
                assert set(pool._eviction.blocks) == pool.evictable

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.finish_all()
        ends = self.shape["eos"]
        for sequence in self.bench.sequences:
            assert (sequence.finish_reason is FinishReason.ABORT) == (sequence.seq_id in self.aborted)
            if sequence.request.pooling:
                continue
            if sequence.finish_reason is FinishReason.STOP and not sequence.group:
                assert sequence.output_ids[-1] in ends
            if sequence.finish_reason is not FinishReason.ABORT and not sequence.group:
                assert not set(sequence.output_ids[:-1]) & set(ends)


@pytest.mark.parametrize("num_examples", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_any_order_of_events_keeps_plans_consistent(num_examples, add_part):
    """About 100 steps in each."""
    add_part("scheduling_policy", "erratic", fcfs, prefill_key=erratic)
    add_part("prefix_cache_eviction", "erratic", ErraticEviction)
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=50,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


FEW_STATES = {
    "num_states": 3,
    "num_host_states": 2,
    "num_host_blocks": 6,
    "preemption_mode": "auto",
    "times": FAST_SWAP,
}
"""Slots are short: sequences take those of snapshots, wait, and are preempted both ways."""
MANY_SNAPSHOTS = {
    "num_states": 25,
    "num_host_states": 1,
    "num_host_blocks": 10,
    "preemption_mode": "swap",
    "num_stages": 3,
}
"""More than there are sequences: most slots hold snapshots, many of the same tokens."""
LONG_WINDOW = {
    "window": 8,
    "num_window_blocks": 12,
    "num_host_window_blocks": 6,
    "num_host_blocks": 10,
    "num_stages": 3,
}
"""Of two prompts in three: sequences are short of windowed blocks before they are short of the others."""
SHORT_WINDOW = {
    "window": 3,
    "num_window_blocks": 9,
    "num_host_window_blocks": 4,
    "num_host_blocks": 10,
    "num_stages": 2,
}
"""Most of what a prompt leaves is freed."""
NO_HOST = {"num_states": 5, "preemption_mode": "recompute", "num_stages": 2, "batch_policy": "greedy"}


def step_at_random(bench: Bench, draw: random.Random, most: int = 99) -> None:
    """A request that comes if there are fewer than ``most``, one that is aborted, a step, or a result."""
    event, scheduler = draw.random(), bench.scheduler
    if event < 0.12 and len(scheduler.waiting) < min(6, most - len(scheduler.running)):
        num_prompt, max_tokens = draw.randint(1, 18), draw.randint(1, 8)
        fitting = NUM_BLOCKS // -(-(num_prompt + max_tokens) // BLOCK_SIZE)
        beams = min(draw.choice([1, 1, 1, 2, 3]), fitting)
        bench.add(num_prompt, max_tokens, shared=draw.choice([0, num_prompt // 2, num_prompt]), num_beams=beams)
    elif event < 0.13:
        if requests := [*scheduler.waiting, *scheduler.running]:
            scheduler.finish(draw.choice(requests), FinishReason.ABORT)
    elif event < 0.6:
        bench.launch()
    elif bench.results:
        bench.update()


@pytest.mark.parametrize(
    "shape", [FEW_STATES, MANY_SNAPSHOTS, NO_HOST], ids=["few states", "many snapshots", "no host"]
)
@pytest.mark.parametrize("num_steps", [1_500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_engine_with_states_leaks_nothing_in_thousands_of_steps(shape, num_steps):
    """One engine for all of them. ``Bench`` checks after each step who holds which block and slot, and that every sequence
    runs on the state of its own tokens."""
    draw = random.Random(num_steps)
    bench = Bench(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        snapshot_interval=2 * BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=16,
        **shape,
    )
    while len(bench.plans) < num_steps:
        step_at_random(bench, draw)
    bench.finish_all()
    counts, kinds = bench.scheduler.counts, {move.kind for plan in bench.plans for move in plan.moves}
    assert counts["found"] > 0, "no prompt went on from a snapshot"
    assert counts["preemptions"] - counts["swaps"] > 0 or shape["preemption_mode"] == "swap"
    swapped = {"swap_out_state", "swap_in_state"} if "num_host_states" in shape else set()
    assert kinds == {"copy", "copy_state", *swapped} | ({"swap_out", "swap_in"} if swapped else set())


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [LONG_WINDOW, SHORT_WINDOW], ids=["long window", "short window"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("num_steps", [700, pytest.param(20_000, marks=pytest.mark.slow)])
def test_blocks_of_windowed_layers_are_counted_and_freed_in_thousands_of_steps(shape, mode, num_steps):
    """One engine for all of them. ``Bench`` checks after each step that the blocks in use are those of running sequences, that no
    sequence holds more than its window, and that each reads its own tokens there."""
    draw = random.Random(num_steps)
    bench = Bench(
        num_blocks=NUM_BLOCKS + 4,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=16,
        chunked_prefill_size=9,
        preemption_mode=mode,
        **shape,
    )
    most, freed = 0, 0
    while len(bench.plans) < num_steps:
        step_at_random(bench, draw)
        windows = bench.tables.windows.blocks
        most = max(most, windows.num_blocks - windows.num_free)
        freed += sum(sequence.cache.windowed.num_freed for sequence in bench.scheduler.running)
    bench.finish_all()
    counts, kinds = bench.scheduler.counts, {move.kind for plan in bench.plans for move in plan.moves}
    assert most > windows.num_blocks // 2 and freed > num_steps, "windows were never short, or never moved on"
    assert counts["found"] > 0, "no prompt went on from a window of another one"
    assert counts["preemptions"] > 0 and (counts["swaps"] > 0) == (mode == "swap")
    swaps = {"swap_out", "swap_in", "swap_out_window", "swap_in_window"} if mode == "swap" else set()
    assert kinds == {"copy", "copy_window", *swaps}


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [
        {"preemption_mode": "recompute"},
        {
            "preemption_mode": "auto",
            "num_host_blocks": 10,
            "times": FAST_SWAP,
            "speculative_config": SpeculativeOptions(),
        },
        {"preemption_mode": "swap", "num_host_blocks": 6, "num_states": 5, "num_host_states": 3},
    ],
    ids=["recompute", "chosen lengths and swaps", "states"],
)
@pytest.mark.parametrize("num_steps", [700, pytest.param(10_000, marks=pytest.mark.slow)])
def test_drafts_leak_nothing_in_thousands_of_steps(shape, num_stages, num_steps):
    """With aborts, beams and preemptions. ``Bench`` checks after each event who holds which block, and each token at the end."""
    draw = random.Random(num_steps + num_stages)
    bench = Bench(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=16,
        num_stages=num_stages,
        proposer=RandomProposer(random.Random(num_steps)),
        **shape,
    )
    while len(bench.plans) < num_steps:
        step_at_random(bench, draw)
    bench.finish_all()
    counts = bench.scheduler.counts
    assert counts["preemptions"] > 20 and counts["drafted"] > num_steps / 10
    assert counts["drafted"] > counts["accepted"] > 0
    assert sum(sequence.finish_reason is FinishReason.ABORT for sequence in bench.sequences) > 10
    assert not bench.scheduler.drafts._lengths._sequences, "a sequence that ended is remembered"


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize(
    "shape",
    [
        {"preemption_mode": "recompute"},
        {
            "preemption_mode": "auto",
            "num_host_blocks": 10,
            "times": FAST_SWAP,
            "speculative_config": SpeculativeOptions(),
        },
        {**LONG_WINDOW, "preemption_mode": "swap", "chunked_prefill_size": 9},
    ],
    ids=["recompute", "chosen lengths and swaps", "windows"],
)
@pytest.mark.parametrize("num_steps", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_chunks_behind_others_leak_nothing_in_thousands_of_steps(shape, num_stages, num_steps):
    """Of few sequences, so that stages are idle: with stale chunks, aborts, beams and preemptions. ``Bench`` checks after each event
    who holds which block, what every chunk reads, and each token at the end."""
    draw = random.Random(num_steps + num_stages)
    bench = Bench(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=16,
        proposer=RandomProposer(random.Random(num_steps), 0.9),
        **{**shape, "num_stages": num_stages},
    )
    num_results_to_discard = 0
    while len(bench.plans) < num_steps:
        step_at_random(bench, draw, most=4)
        num_results_to_discard += any(sequence.num_results_to_discard > 0 for sequence in bench.scheduler.running)
    bench.finish_all()
    counts = bench.scheduler.counts
    assert bench.num_behind > num_steps / 20 and num_results_to_discard > num_steps / 50 and counts["preemptions"] > 10
    assert counts["continued"] >= bench.num_behind and counts["drafted"] > counts["accepted"] > num_steps / 4
    assert sum(sequence.finish_reason is FinishReason.ABORT for sequence in bench.sequences) > 10
    assert not bench.scheduler.drafts._lengths._sequences, "a sequence that ended is remembered"
