"""A draft model on rank 0 beside every layout, or on a spare rank: the answers are those without it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from layouts import layouts_for
from speculated_requests import NUM_ALL, NUM_REQUESTS, make_requests, tell

import labinfer
from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import CollectiveError
from labinfer.engine import draft_lengths

HELD_OUT = Path(labinfer.__file__).parent / "assets" / "held-out" / "conversations.jsonl"
FIELDS = [
    {"max_tokens": 14, "ignore_eos": True},
    {"max_tokens": 16, "temperature": 0.8, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.2},
    {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2, "structured_outputs": {"regex": "([a-z]+ )+[0-9]{9}"}},
    {"max_tokens": 12, "temperature": 1.0, "seed": 6, "ignore_eos": True},
    {"max_tokens": 12, "ignore_eos": True, "frequency_penalty": 0.8},
]


def answers(llm: LLM, prompts: list[list[int]]) -> tuple[list, int, int]:
    """Tokens of the answers, drafted and accepted ones; on rank 0."""
    params = [msgspec.convert(fields, SamplingParams) for fields in FIELDS]
    outputs = llm.generate([prompt[:30] for prompt in prompts], params)
    if not llm.is_rank0:
        return [], 0, 0
    counts = llm.report.counts
    return (
        [[answer.token_ids for answer in output.completions] for output in outputs],
        counts["drafted"],
        counts["accepted"],
    )


def test_answers_are_those_without_a_draft_model(group, golden):
    """The model drafts for itself, so most of what is drafted is right."""
    directory, prompts, _ = golden
    for layout in layouts_for(group.size):
        flat = {"model": str(directory), "block_size": 4, "num_kv_blocks": 200, **layout}
        expected, _, _ = answers(LLM.from_options(group, EngineOptions.from_flat(flat)), prompts)
        drafted = {"model": str(directory), "num_speculative_tokens": 3}
        llm = LLM.from_options(group, EngineOptions.from_flat({**flat, "speculative_config": drafted}))
        tokens, num_drafted, num_accepted = answers(llm, prompts)
        if llm.is_rank0:
            assert tokens == expected, layout
            assert 20 < num_drafted < 2 * num_accepted, layout
        assert (llm.draft_model is not None) == llm.is_rank0


def answers_of_some_at_a_time(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> tuple[list, Counter[str]]:
    """Outputs and counts; on rank 0. The last ones of each call leave stages idle, so that drafts go behind others."""
    outputs, counts = [], Counter()
    for first in range(0, len(prompts), NUM_REQUESTS):
        found = llm.generate(prompts[first : first + NUM_REQUESTS], params[first : first + NUM_REQUESTS])
        if llm.is_rank0:
            outputs += found
            counts += llm.report.counts
    return outputs, counts


@pytest.mark.parametrize("count", [NUM_REQUESTS, pytest.param(NUM_ALL, marks=pytest.mark.slow)])
def test_answers_of_all_kinds_are_those_without_the_draft_of_the_demo(group, count):
    prompts = [line["messages"][0]["content"] for line in map(json.loads, HELD_OUT.read_text("utf-8").splitlines())]
    chosen, params = make_requests(prompts, count)
    for layout in layouts_for(group.size):
        if "layers" in layout:
            continue  # of a model with fewer
        flat = {"model": "demo", "dtype": "float32", "block_size": 4, "num_kv_blocks": 600, **layout}
        flat["speculative_config"] = {"model": "demo-draft", "num_speculative_tokens": 4, "continuous": True}
        llm = LLM.from_options(group, EngineOptions.from_flat(flat))
        drafts = llm.engine.scheduler.drafts if llm.is_rank0 else None
        if drafts:
            drafts.proposer, proposer = None, drafts.proposer
        expected, _ = answers_of_some_at_a_time(llm, chosen, params)
        if drafts:
            drafts.proposer = proposer
        outputs, counts = answers_of_some_at_a_time(llm, chosen, params)
        if drafts:
            assert tell(outputs) == tell(expected), layout
            assert counts["drafted"] > counts["accepted"] > count
            assert (counts["continued"] > 0) == (llm.spec.num_stages > 1)


def test_answers_are_those_with_a_draft_model_on_a_spare_rank(group, golden, monkeypatch):
    """Two runs, as the rank that drafts goes on with the next; the second model chooses the lengths, and some draft each time."""
    directory, prompts, _ = golden
    if group.size not in (2, 3):
        return
    monkeypatch.setattr(draft_lengths, "LEAST_GAIN", 0.0)  # whatever a draft costs here
    spare, ranks = group.size - 1, tuple(range(group.size - 1))
    flat = {"model": str(directory), "block_size": 4, "num_kv_blocks": 200}
    flat |= {"ranks": ranks, "pipeline_parallel_size": len(ranks)}
    expected, _, _ = answers(LLM.from_options(group, EngineOptions.from_flat(flat)), prompts)
    for lengths in ({"num_speculative_tokens": 3}, {}):
        drafted = {"model": str(directory), "draft_rank": spare, **lengths}
        llm = LLM.from_options(group, EngineOptions.from_flat({**flat, "speculative_config": drafted}))
        for _ in range(2 if lengths else 1):
            tokens, num_drafted, num_accepted = answers(llm, prompts)
            if llm.is_rank0:
                assert tokens == expected
                assert 20 < num_drafted < 2 * num_accepted
        assert llm.is_spare == (group.rank == spare)


def test_rank_that_cannot_draft_is_refused(group, golden):
    directory, _, _ = golden
    drafted = {"model": str(directory), "draft_rank": group.size}
    flat = {"model": str(directory), "tensor_parallel_size": group.size, "speculative_config": drafted}
    with pytest.raises(CollectiveError, match=f"draft_rank {group.size} does not exist among {group.size} ranks;"):
        LLM.from_options(group, EngineOptions.from_flat(flat))
    if group.size > 1:
        drafted["draft_rank"] = 1
        with pytest.raises(
            CollectiveError, match=r"draft_rank 1 is in use by rank 1 \(stage 0, tp 1\); give a spare rank"
        ):
            LLM.from_options(group, EngineOptions.from_flat(flat))
