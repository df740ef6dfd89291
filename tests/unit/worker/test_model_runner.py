"""ModelRunner on plans written by hand: vectors of prompts that come in chunks, and what stands beside them in a step."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import load, write

from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.plan import POOLINGS, BatchEntry, BatchPlan, BatchResult, EntryResult, SequenceStart, TokenSampling
from labinfer.launch.providers import reference_registry
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.model_runner import ModelRunner

CPU = torch.device("cpu")
BLOCK, BLOCKS_EACH, HIDDEN = 4, 4, 48
PROMPTS = [[5, 9, 17, 3, 3, 40, 21, 8, 11], [7, 8, 9], [33, 2, 2, 49, 1], [30, 31, 32, 33]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("runner"))[0]


@pytest.fixture
def runner(directory):
    model, _ = load(directory)
    cache = KVCacheManager(
        model.cache_specs(),
        CacheSizes(num_blocks=16, max_model_len=64),
        block_size=BLOCK,
        dtype=torch.float32,
        device=CPU,
        rotary_table=model.rotary_table,
    )
    model.make_rotary_tables(64, CPU)
    functions = reference_registry().select(CPU, torch.float32)
    return ModelRunner(model, cache, device=CPU, dtype=torch.float32, functions=functions)


def start(seq_id: int, **sampling) -> SequenceStart:
    return SequenceStart(seq_id, PROMPTS[seq_id], TokenSampling(num_prompt_tokens=len(PROMPTS[seq_id]), **sampling))


def chunk(seq_id: int, begin: int, end: int, num_samples: int = 0, **fields) -> BatchEntry:
    """Every sequence has its own four blocks, known from the first of its chunks on."""
    blocks = [BLOCKS_EACH * seq_id + index for index in range(BLOCKS_EACH)]
    return BatchEntry(
        seq_id=seq_id,
        num_tokens=end - begin,
        begin=begin,
        position=begin,
        first_block=0,
        new_blocks=blocks,
        num_samples=num_samples,
        **fields,
    )


def run(runner: ModelRunner, starts=(), entries=(), finished=()) -> BatchResult:
    plan = BatchPlan(step_id=0, starts=list(starts), finished=list(finished), moves=[], entries=list(entries))
    batch = runner.prepare(plan)
    return runner.sample(plan, batch, runner.run(plan, batch, None))


@torch.inference_mode()
def vector_of(runner: ModelRunner, seq_id: int, pooling: str) -> torch.Tensor:
    """By the model alone, of the whole prompt at once."""
    plan = BatchPlan(
        step_id=0, starts=[start(seq_id)], finished=[], moves=[], entries=[chunk(seq_id, 0, len(PROMPTS[seq_id]))]
    )
    batch = runner.prepare(plan, all_rows=True)
    normed_TD = runner.model.model.norm(runner.run(plan, batch, None))[1].double()
    runner.forget([seq_id])
    return {"mean": normed_TD.mean(dim=0), "cls": normed_TD[0], "last": normed_TD[-1]}[pooling]


def assert_is(values: tuple[float, ...], wanted_D: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), wanted_D, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("sizes", [[9], [4, 5], [8, 1], [1] * 9], ids=str)
def test_vector_comes_with_the_last_chunk_and_does_not_depend_on_the_chunks(runner, pooling, sizes):
    wanted_D = vector_of(runner, 0, pooling)
    begin, results = 0, []
    for size in sizes:
        end = begin + size
        entry = chunk(0, begin, end)
        results.append(run(runner, [start(0, pooling=pooling)] if begin == 0 else [], [entry]))
        begin = end
    assert [result.entries for result in results[:-1]] == [[EntryResult()]] * (len(sizes) - 1)
    assert results[-1].entries == [EntryResult(vector=results[-1].entries[0].vector)]
    assert_is(results[-1].entries[0].vector, wanted_D)


def test_two_vectors_of_a_prompt_differ(runner):
    assert (vector_of(runner, 0, "mean") - vector_of(runner, 0, "last")).abs().max() > 0.1


def test_each_entry_has_its_own_result(runner):
    """A step with one that samples, two means of which one goes on, a last token, and one that is measured."""
    sampled = run(runner, [start(1)], [chunk(1, 0, 3, num_samples=1)]).entries
    measured = run(runner, [start(3, logprobs=1)], [chunk(3, 0, 4, num_samples=1)]).entries
    runner.forget([1, 3])
    mean_D, last_D = vector_of(runner, 0, "mean"), vector_of(runner, 2, "last")
    run(runner, [start(0, pooling="mean"), start(2, pooling="last")], [chunk(0, 0, 2), chunk(2, 0, 1)])
    entries = [
        chunk(1, 0, 3, num_samples=1),
        chunk(0, 2, 9),
        chunk(3, 0, 4, num_samples=1),
        chunk(2, 1, 5),
    ]
    result = run(runner, [start(1), start(3, logprobs=1)], entries)
    assert result.entries[0] == sampled[0] and len(sampled[0].token_ids) == 1
    assert result.entries[2].token_ids == measured[0].token_ids
    (ours,), (theirs,) = result.entries[2].logprobs, measured[0].logprobs
    assert (ours.token_id, list(ours.top)) == (theirs.token_id, list(theirs.top)) and len(ours.top) == 1
    assert [ours.logprob, *ours.top.values()] == pytest.approx(
        [theirs.logprob, *theirs.top.values()], rel=1e-5, abs=1e-5
    )
    assert [entry.token_ids for entry in (result.entries[1], result.entries[3])] == [(), ()]
    assert_is(result.entries[1].vector, mean_D)
    assert_is(result.entries[3].vector, last_D)


def test_sequence_that_is_started_anew_begins_its_sum_anew(runner):
    wanted_D = vector_of(runner, 0, "mean")
    run(runner, [start(0, pooling="mean")], [chunk(0, 0, 5)])
    again = run(runner, [start(0, pooling="mean")], [chunk(0, 0, 9)], finished=[0])
    assert_is(again.entries[0].vector, wanted_D)


def test_means_sum_is_of_that_sequence_alone(runner):
    wanted = [vector_of(runner, seq_id, "mean") for seq_id in (0, 2)]
    run(runner, [start(0, pooling="mean"), start(2, pooling="mean")], [chunk(2, 0, 2), chunk(0, 0, 6)])
    entries = [chunk(0, 6, 9), chunk(2, 2, 5)]
    first, second = run(runner, entries=entries).entries
    assert_is(first.vector, wanted[0])
    assert_is(second.vector, wanted[1])


def test_each_prefix_is_sampled_as_it_would_be_alone(runner):
    """With penalties, a seed, log-probabilities and masks that differ by place."""
    processors = [("repetition_penalty", 1.7), ("frequency_penalty", 0.5), ("min_tokens", [2, list(range(25))])]
    fields = {"temperature": 0.9, "seed": 5, "logprobs": 2, "processors": processors}
    masks = tuple(number.to_bytes(7, "little") for number in (2**50 - 1, 2**40 - 1, 2**50 - 7))
    drafted = (20, 31)
    alone = []
    for length in range(3):
        begun = SequenceStart(1, [*PROMPTS[1], *drafted[:length]], TokenSampling(num_prompt_tokens=3, **fields))
        entry = chunk(1, 0, 3 + length, num_samples=1, masks=masks[length : length + 1])
        alone += run(runner, [begun], [entry], finished=[1] if length else []).entries
    run(runner, [start(1, **fields)], [chunk(1, 0, 2)], finished=[1])
    entry = chunk(1, 2, 5, num_samples=3, masks=masks, new_tokens=drafted)
    (together,) = run(runner, entries=[entry]).entries
    assert together.token_ids == tuple(token for result in alone for token in result.token_ids)
    for ours, theirs in zip(together.logprobs, [result.logprobs[0] for result in alone], strict=True):
        assert (ours.token_id, list(ours.top)) == (theirs.token_id, list(theirs.top))
        assert [ours.logprob, *ours.top.values()] == pytest.approx(
            [theirs.logprob, *theirs.top.values()], rel=1e-5, abs=1e-5
        )


def test_new_tokens_take_the_place_of_rejected_ones(runner):
    (expected,) = run(
        runner,
        [SequenceStart(1, [*PROMPTS[1], 30, 40], TokenSampling(num_prompt_tokens=3, logprobs=1))],
        [chunk(1, 0, 5, num_samples=1)],
    ).entries
    run(runner, [start(1, logprobs=1)], [chunk(1, 0, 3, num_samples=1)], finished=[1])
    run(runner, entries=[chunk(1, 3, 7, num_samples=4, new_tokens=(30, 11, 12, 13))])
    (found,) = run(runner, entries=[chunk(1, 4, 5, num_samples=1, new_tokens=(40,))]).entries
    assert found.token_ids == expected.token_ids
    assert found.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, rel=1e-5, abs=1e-5)
