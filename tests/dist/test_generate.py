"""``LLM`` over this world, in the layouts its size allows: Transformers' tokens, and agreement on refusals."""

from __future__ import annotations

import pytest
from layouts import GREEDY, layouts_for

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import CollectiveError, UserError
from labinfer.weights import tensor_files

SLOW = pytest.mark.slow


@pytest.mark.parametrize("schedule", ["1f1b", *(pytest.param(name, marks=SLOW) for name in ("gpipe", "lockstep"))])
def test_tokens_equal_transformers(group, golden, schedule):
    directory, prompts, tokens = golden
    for layout in layouts_for(group.size):
        flat = {"model": str(directory), "pipeline_schedule": schedule, "chunked_prefill_size": 20, **layout}
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        outputs = llm.generate(prompts if llm.is_rank0 else None, GREEDY)
        if llm.is_rank0:
            assert [output.token_ids for output in outputs] == tokens, layout
            assert llm.report.num_finished == len(prompts)
            assert len(llm.report.workers) == group.size
        else:
            assert outputs is None


@pytest.mark.parametrize("order", ["backwards", "rank 0 in the middle", "spare"])
def test_ranks_in_another_order_give_the_same_tokens(group, golden, order):
    """Rank 0 schedules, whatever its stage is; where it is on the last one it samples, too."""
    directory, prompts, tokens = golden
    ranks = tuple(range(group.size))
    ranks = {"backwards": ranks[::-1], "rank 0 in the middle": (*ranks[1:2], 0, *ranks[2:]), "spare": ranks[::2]}[order]
    for layout in layouts_for(len(ranks)):
        flat = {"model": str(directory), "ranks": ranks, **layout}
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        outputs = llm.generate(prompts if llm.is_rank0 else None, GREEDY)
        assert llm.is_spare == (group.rank not in ranks)
        if llm.is_rank0:
            assert [output.token_ids for output in outputs] == tokens, layout
            assert [worker.rank for worker in llm.report.workers] == sorted(ranks)


@pytest.mark.parametrize("chunk", [7, pytest.param(512, marks=SLOW)])
def test_prompts_found_in_the_cache_give_the_same_tokens(group, golden, chunk):
    """Second time round everything but the last block is found, and so it is in the next turn of a conversation."""
    directory, prompts, tokens = golden
    for layout in layouts_for(group.size):
        flat = {"model": str(directory), "block_size": 4, "chunked_prefill_size": chunk, **layout}
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        for again in range(2):
            outputs = llm.generate(prompts if llm.is_rank0 else None, GREEDY)
            if llm.is_rank0:
                assert [output.token_ids for output in outputs] == tokens, layout
                if again:
                    found = [output.num_cached_tokens for output in outputs]
                    assert found == [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
                    assert llm.report.hit_rate > 0.5
        whole = [prompt + answer for prompt, answer in zip(prompts, tokens, strict=True)] if llm.is_rank0 else None
        outputs = llm.generate(whole, SamplingParams(max_tokens=1))  # the next turn of a conversation
        if llm.is_rank0:
            found = [output.num_cached_tokens for output in outputs]
            assert found == [(len(prompt) - 1) // 4 * 4 for prompt in whole]


def test_processors_and_log_probabilities_are_those_of_one_rank(group, golden):
    """All that travels beside the tokens, on every layout, with room for a part of the requests only."""
    directory, prompts, _ = golden
    params = [
        SamplingParams(
            max_tokens=6, n=1 + index % 2, temperature=1.2 * (index % 3 > 0), seed=index, ignore_eos=True, min_tokens=3,
            logit_bias={7: 2.0}, repetition_penalty=1.3, presence_penalty=0.5, stop_token_ids=[5], min_p=0.01,
            logprobs=(None, 0, 4)[index % 3], prompt_logprobs=(2, None)[index % 2],
        )
        for index in range(len(prompts))
    ]  # fmt: skip
    expected = None
    for layout in [{"tensor_parallel_size": 1}] * (group.size == 1) + layouts_for(group.size):
        flat = {"model": str(directory), "block_size": 4, "num_kv_blocks": 40, "chunked_prefill_size": 16, **layout}
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        outputs = llm.generate(prompts, params)
        if not llm.is_rank0:
            continue
        assert len(outputs) == len(prompts)
        told = [
            (
                [(c.token_ids, [(m.token_id, pytest.approx(m.logprob, abs=1e-4)) for m in c.logprobs or []]) for c in o.completions],
                [(m.token_id, list(m.top)) for m in o.prompt_logprobs or []],
            )
            for o in outputs
        ]  # fmt: skip
        expected = expected or told
        assert told == expected, layout


def test_refusal_is_heard_on_every_rank(group, golden):
    directory, _, _ = golden
    with pytest.raises(CollectiveError, match="needs"):
        LLM.from_options(
            group, EngineOptions.from_flat({"model": str(directory), "tensor_parallel_size": group.size + 1})
        )
    with pytest.raises(CollectiveError, match="only rank 0 knows"), group.raise_on_all_ranks():
        if group.rank == 0:
            raise UserError("only rank 0 knows")
    last = group.size - 1
    with pytest.raises(CollectiveError, match="the last rank knows"), group.raise_on_all_ranks():
        if group.rank == last:
            raise UserError("the last rank knows")


def test_weights_are_read_by_range(group, golden, monkeypatch):
    """The ranks of one stage together read the matrices once; only the norms are read by all."""
    monkeypatch.setattr(tensor_files, "SHORTEST_GAP", 0)  # the gaps in this small model's rows would be read as well
    directory, prompts, _ = golden
    flat = {"model": str(directory), "tensor_parallel_size": group.size}
    llm = LLM.from_options(group, EngineOptions.from_flat(flat))
    llm.generate(prompts[:1] if llm.is_rank0 else None, GREEDY)
    if llm.is_rank0:
        read = [worker.weight_bytes_read for worker in llm.report.workers]
        hidden, kv_columns, norms = 112, 2 * 8, 9
        whole = (512 + 4 * (2 * 112 + 2 * kv_columns + 3 * 160)) * hidden + 4 * (112 + 2 * kv_columns) + norms * hidden
        replicated_heads = max(0, group.size - 2)  # two KV heads: beyond two ranks some hold a copy
        upper = 4 * (whole + (group.size - 1) * norms * hidden + replicated_heads * 4 * 2 * 8 * (hidden + 1) * 2)
        assert 4 * whole <= sum(read) <= upper
