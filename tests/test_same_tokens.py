"""The same seed gives the same tokens in fp32, whatever else runs and however it is run."""

from __future__ import annotations

import pytest
from checkpoints import make_checkpoint, mixed_prompts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labinfer import LLM, SamplingParams, StructuredOutputs
from labinfer.base.config import BATCH_POLICIES, SCHEDULING_POLICIES

BLOCK = 4
SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = [*mixed_prompts(6), *(SHARED + prompt[:20] for prompt in mixed_prompts(6, seed=2))]
PARAMS = [
    SamplingParams(max_tokens=18, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.1, top_p=0.9, seed=4, repetition_penalty=1.2),
    SamplingParams(max_tokens=12, temperature=0.8, top_k=40, seed=5, n=2, min_tokens=6),
    SamplingParams(max_tokens=10, num_beams=3, n=2, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.9, seed=6, ignore_eos=True, max_context_len=100),
    SamplingParams(
        max_tokens=24, temperature=1.3, seed=7, n=2, structured_outputs=StructuredOutputs(regex="([a-z]+ ){9,}")
    ),
]
REQUESTS = [(prompt, PARAMS[index % len(PARAMS)]) for index, prompt in enumerate(PROMPTS)]
LONGEST = 3 * -(-100 // BLOCK)
"""Blocks that the largest request needs alone: three beams."""

HOW = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.integers(4, 80),
        "chunked_prefill_size": st.integers(1, 80),
        "max_num_seqs": st.integers(3, 16),
        "num_kv_blocks": st.sampled_from([LONGEST, LONGEST + 20, 600]),
        "enable_prefix_caching": st.booleans(),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "scheduling_policy": st.sampled_from(SCHEDULING_POLICIES),
        "batch_policy": st.sampled_from(BATCH_POLICIES),
        "max_inflight": st.integers(1, 3),
    }
)
WHICH = st.lists(st.sampled_from(range(len(REQUESTS))), min_size=1, max_size=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("same") / "model", "llama-untied")


@pytest.fixture(scope="module")
def alone(checkpoint):
    """The answers to each request, one after another with nothing in the cache."""
    with LLM(str(checkpoint), block_size=BLOCK, num_kv_blocks=600, enable_prefix_caching=False, threads=1) as llm:
        return [answers(llm.generate([prompt], params)[0]) for prompt, params in REQUESTS]


def answers(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.completions]


@pytest.mark.parametrize("num_examples", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_same_seed_gives_the_same_tokens(checkpoint, alone, num_examples):
    """Also where a request comes twice, and where a second run finds the first one's blocks."""

    @settings(max_examples=num_examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(how=HOW, which=WHICH, again=st.booleans())
    def check(how, which, again):
        swap = {"swap_space": 0.0005} if how["preemption_mode"] == "swap" else {}
        with LLM(str(checkpoint), block_size=BLOCK, threads=1, **how, **swap) as llm:
            for _ in range(1 + again):
                outputs = llm.generate([REQUESTS[i][0] for i in which], [REQUESTS[i][1] for i in which])
                assert [answers(output) for output in outputs] == [alone[i] for i in which]

    check()
