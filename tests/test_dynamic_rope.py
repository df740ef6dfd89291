"""Rope of type ``dynamic``: tokens and logits are those of Transformers' ``generate``, alone, in chunks, in batches and resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import mixed_prompts, transformers_greedy, transformers_states, worst_vector_error
from dynamic_rope import FACTOR, LIMIT, make_dynamic
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from labinfer import LLM, SamplingParams
from labinfer.base.errors import UserError
from labinfer.models.layers.rope import dynamic_frequencies

NUM_TOKENS = 12
PROMPTS = mixed_prompts()
"""Prompts of 1 to 90 tokens, some of which cross the limit while they are answered."""
SMALL = {"block_size": 4, "num_kv_blocks": 400, "threads": 1, "autotune": "off"}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama-untied", "qwen2-windows"])
def checkpoint(request, tmp_path_factory):
    return make_dynamic(tmp_path_factory.mktemp("dynamic"), request.param)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Of each prompt by a model that has seen no other: Transformers remembers the longest context that it has seen."""
    return [transformers_greedy(checkpoint, [prompt], NUM_TOKENS)[0]["token_ids"] for prompt in PROMPTS]


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_tokens_are_those_of_transformers_in_any_chunks_and_batch(checkpoint, expected, chunk):
    """Also the second time, when prompts of their length are in the cache."""
    with LLM(str(checkpoint), **SMALL, chunked_prefill_size=chunk, max_num_batched_tokens=96) as llm:
        assert llm.spec.max_model_len == LIMIT * FACTOR
        for _ in range(2):
            assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_vectors_of_long_prompts_are_those_of_transformers(checkpoint):
    states = [transformers_states(checkpoint, [prompt])[0] for prompt in PROMPTS]
    with LLM(str(checkpoint), **SMALL, chunked_prefill_size=5) as llm:
        for pooling in ("last", "mean"):
            vectors = [output.embedding for output in llm.embed(PROMPTS, pooling, normalize=False)]
            assert worst_vector_error(vectors, states, pooling) < 1e-5


def test_prompts_of_other_lengths_share_no_blocks_beyond_the_limit(checkpoint, expected):
    """A prompt, its beginning, and what follows it in a conversation: each is rotated by its own length."""
    whole = PROMPTS[1]
    prompts = [whole[:60], whole, whole[:20], whole[:30]]
    wanted = [transformers_greedy(checkpoint, [prompt], NUM_TOKENS)[0]["token_ids"] for prompt in prompts]
    with LLM(str(checkpoint), **SMALL) as llm:
        outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert tokens_of(outputs) == wanted
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 20]
        (again,) = llm.generate(whole, GREEDY)
        assert again.token_ids == wanted[1] and again.num_cached_tokens == 88


def test_answers_go_on_after_preemption_and_where_they_were_resumed(checkpoint, expected):
    few = SMALL | {"num_kv_blocks": 34, "chunked_prefill_size": 9, "preemption_mode": "recompute"}
    with LLM(str(checkpoint), **few, max_model_len=110) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        assert llm.report.counts["preemptions"] > 0
        for number in (1, 3):
            request = llm.make_request(number, PROMPTS[number], GREEDY)
            (output,) = llm.run([replace(request, output_token_ids=tuple(expected[number][:5]))])
            assert output.token_ids == expected[number][5:]


def test_drafts_change_no_answer(checkpoint, expected):
    with LLM(str(checkpoint), **SMALL, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_short_contexts_are_plain_rope(tmp_path):
    wanted = tokens_of(generate(make_dynamic(tmp_path, rope_type="default"), PROMPTS[2:3]))
    assert tokens_of(generate(make_dynamic(tmp_path), PROMPTS[2:3])) == wanted


def generate(directory, prompts):
    with LLM(str(directory), **SMALL) as llm:
        return llm.generate(prompts, GREEDY)


def test_context_shift_is_refused(checkpoint):
    with pytest.raises(UserError, match="context_shift is not supported for this model"):
        LLM(str(checkpoint), **SMALL, context_shift=True)


@pytest.mark.parametrize("parameters", [{"factor": None}, {"factor": "four"}, {"factor": 0}])
def test_factor_that_is_missing_or_none_is_refused(tmp_path, parameters):
    with pytest.raises(UserError, match="rope parameter 'factor' should be a number above 0"):
        LLM(str(make_dynamic(tmp_path, **parameters)), **SMALL)


def test_frequencies_are_those_of_transformers():
    parameters = {"rope_type": "dynamic", "rope_theta": 500000.0, "factor": 2.5}
    config = LlamaConfig(head_dim=64, max_position_embeddings=512, rope_parameters=dict(parameters))
    lengths = [1, 512, 513, 700, 1280]
    found = dynamic_frequencies(64, parameters, 512, torch.tensor(lengths))
    for length, row in zip(lengths, found, strict=True):
        theirs, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=torch.tensor(length))
        assert factor == 1.0
        torch.testing.assert_close(row, theirs, rtol=1e-6, atol=0)
