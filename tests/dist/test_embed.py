"""``LLM.embed`` over this world, in the layouts its size allows: Transformers' vectors, beside requests that generate."""

from __future__ import annotations

import pytest
from checkpoints import transformers_states, worst_vector_error
from layouts import GREEDY, layouts_for

from labinfer import SamplingParams
from labinfer.api.llm import LLM
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.base.plan import POOLINGS

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def states(group, golden):
    """On rank 0."""
    directory, prompts, _ = golden
    return transformers_states(directory, prompts) if group.rank == 0 else None


def build(group, golden, **options) -> LLM:
    return LLM.from_options(group, EngineOptions.from_flat({"model": str(golden[0]), "block_size": 4} | options))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=SLOW), 7, pytest.param(64, marks=SLOW)])
def test_vectors_are_those_of_transformers(group, golden, states, chunk):
    prompts = golden[1]
    for layout in layouts_for(group.size):
        llm = build(group, golden, num_kv_blocks=200, chunked_prefill_size=chunk, **layout)
        for pooling in POOLINGS:
            outputs = llm.embed(prompts if llm.is_rank0 else None, pooling, normalize=False)
            if llm.is_rank0:
                vectors = [output.embedding for output in outputs]
                assert worst_vector_error(vectors, states, pooling) < TOLERANCE, (layout, pooling)
            else:
                assert outputs is None


@pytest.mark.parametrize("schedule", [*(pytest.param(name, marks=SLOW) for name in ("1f1b", "gpipe")), "lockstep"])
def test_beside_requests_that_generate_and_take_their_blocks(group, golden, states, schedule):
    """The answers leave room for one long prompt beside them, at first; their tokens are Transformers', too."""
    _, prompts, tokens = golden
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    few = {"num_kv_blocks": 40, "chunked_prefill_size": 2, "max_model_len": 110}
    for layout in layouts_for(group.size):
        llm = build(group, golden, pipeline_schedule=schedule, enable_prefix_caching=False, **few, **layout)
        if not llm.is_rank0:
            llm.follow()
            continue
        requests = [llm.make_request(("text", index), prompts[index], GREEDY) for index in by_length[:-1]]
        for index in reversed(by_length):
            for pooling in POOLINGS:
                requests.append(llm.make_request((pooling, index), prompts[index], SamplingParams(), pooling=pooling))
        outputs = {output.key: output for output in llm.run(requests)}
        assert len(outputs) == len(requests)
        for (kind, index), output in outputs.items():
            if kind == "text":
                assert output.token_ids == tokens[index], (layout, index)
            else:
                assert worst_vector_error([output.embedding], [states[index]], kind) < TOLERANCE, (layout, kind, index)
        if schedule == "lockstep":  # one micro-batch in flight: prompts rest between their chunks
            assert llm.report.counts["preemptions"] > 0, layout


def test_refusal_on_rank_0_lets_the_others_go(group, golden, states):
    llm = build(group, golden, num_kv_blocks=60, tensor_parallel_size=group.size)
    if llm.is_rank0:
        with pytest.raises(UserError, match="pooling must be one of"):
            llm.embed(golden[1], "max")
    else:
        assert llm.embed(None, "max") is None
    outputs = llm.embed(golden[1], normalize=False)
    if llm.is_rank0:
        assert worst_vector_error([output.embedding for output in outputs], states, "last") < TOLERANCE
