"""``--kv-cache-dtype`` through ``LLM`` in one process: what a cache in fewer bits loses, and what it saves."""

from __future__ import annotations

import statistics

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts

from labinfer import LLM, SamplingParams
from labinfer.base.config import EngineOptions
from labinfer.base.errors import UserError
from labinfer.comm.spmd.machine import RankInfo
from labinfer.launch.layout.layout import make_layout

PROMPTS = mixed_prompts()
PARAMS = SamplingParams(max_tokens=8, logprobs=0, prompt_logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("kv-dtype") / "model", "qwen2-tied")


def open_llm(checkpoint, **options) -> LLM:
    return LLM(str(checkpoint), block_size=4, num_kv_blocks=400, max_num_batched_tokens=64, **options)


@pytest.fixture(scope="module")
def float32(checkpoint):
    with open_llm(checkpoint, kv_cache_dtype="float32") as llm:
        return llm.generate(PROMPTS, PARAMS)


def test_auto_is_the_type_of_the_activations(checkpoint, float32):
    with open_llm(checkpoint) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert {tensor.dtype for tensor in pools(llm)} == {torch.float32}
    for output, exact in zip(outputs, float32, strict=True):
        assert output.token_ids == exact.token_ids
        assert output.completions[0].logprobs == exact.completions[0].logprobs
        assert output.prompt_logprobs == exact.prompt_logprobs
    with open_llm(checkpoint, dtype="bfloat16") as llm:
        assert {tensor.dtype for tensor in pools(llm)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("kv_cache_dtype", "first", "mean"), [("float16", 0.008, 0.007), ("bfloat16", 0.05, 0.055), ("int8", 0.22, 0.11)]
)
def test_fewer_bits_lose_little(checkpoint, float32, kv_cache_dtype, first, mean):
    """Twice what was measured: |Δ log-probability| of each prompt's first token at most 0.0038, 0.026 and 0.11; of all
    prompt tokens 0.0033, 0.028 and 0.054 in the mean. The logits of these random weights are large, so that little goes
    a long way."""
    with open_llm(checkpoint, kv_cache_dtype=kv_cache_dtype) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert pools(llm)[0].dtype == getattr(torch, kv_cache_dtype)
        assert {output.finish_reason for output in outputs} == {"length"}
    for output, exact in zip(outputs, float32, strict=True):
        ours, theirs = output.completions[0].logprobs[0], exact.completions[0].logprobs[0]
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=first)
    pairs = [
        (ours.logprob, theirs.logprob)
        for output, exact in zip(outputs, float32, strict=True)
        for ours, theirs in zip(output.prompt_logprobs, exact.prompt_logprobs, strict=True)
    ]
    assert 0 < statistics.mean(abs(ours - theirs) for ours, theirs in pairs) <= mean


def test_type_wider_than_the_activations_changes_nothing(checkpoint):
    found = []
    for kv_cache_dtype in ("auto", "float32"):
        with open_llm(
            checkpoint, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, functions="reference"
        ) as llm:  # the compiled functions take a bfloat16 cache only
            found.append([output.token_ids for output in llm.generate(PROMPTS, PARAMS)])
    assert found[0] == found[1]


def test_int8_serves_bfloat16_activations(checkpoint):
    with open_llm(checkpoint, dtype="bfloat16", kv_cache_dtype="int8") as llm:
        assert {tensor.dtype for tensor in pools(llm)} == {torch.int8, torch.float32}
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [len(output.token_ids) for output in outputs] == [8] * len(PROMPTS)


def test_int8_blocks_are_found_again_by_later_requests(checkpoint):
    """What a later request finds are the numbers and the scales."""
    params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True)
    with open_llm(checkpoint, kv_cache_dtype="int8") as llm:
        (fresh,), (found,) = (llm.generate(PROMPTS[1], params) for _ in range(2))
    assert (fresh.num_cached_tokens, found.num_cached_tokens) == (0, 88)
    assert found.token_ids == fresh.token_ids
    ours, theirs = ([one.logprob for one in output.completions[0].logprobs] for output in (found, fresh))
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_blocks_are_counted_with_their_scales(checkpoint):
    """4 layers, keys and values, 4 tokens, 2 heads of 8 numbers; in int8 each head has 4 bytes of scale as well."""
    expected = {"float32": 2048, "float16": 1024, "bfloat16": 1024, "int8": 512 + 256}
    for kv_cache_dtype, count in expected.items():
        with open_llm(checkpoint, kv_cache_dtype=kv_cache_dtype) as llm:
            assert llm.layout.block_bytes(llm.place) == count
            assert sum(tensor.nbytes for tensor in pools(llm)) == 400 * count


@pytest.mark.parametrize(
    ("kv_cache_dtype", "expected"),
    [("auto", (torch.float32, torch.bfloat16)), ("int8", (torch.int8, torch.int8))],
)
def test_auto_follows_each_stage_and_a_choice_holds_for_all(checkpoint, kv_cache_dtype, expected):
    with LLM(str(checkpoint), num_kv_blocks=8) as llm:
        config, everyone = llm.layout.config, llm.group.everyone
    flat = {"dtype": "float32,bfloat16", "pipeline_parallel_size": 2, "kv_cache_dtype": kv_cache_dtype}
    layout = make_layout(EngineOptions.from_flat(flat), config, _two_ranks(everyone[0]))
    assert tuple(layout.kv_dtype(layout.topology.place(rank)) for rank in range(2)) == expected
    assert [layout.dtype(layout.topology.place(rank)) for rank in range(2)] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("value", ["fp8", "int4", "float32,int8"])
def test_type_that_is_not_offered_is_refused(checkpoint, value):
    with pytest.raises(UserError) as caught:
        LLM(str(checkpoint), kv_cache_dtype=value)
    assert str(caught.value) == (f"kv_cache_dtype {value}: choose one of auto, float32, bfloat16, float16, int8")


def pools(llm: LLM) -> list[torch.Tensor]:
    return [tensor for layer in llm._parts.worker.runner.cache.layers for tensor in layer.tensors()]


def _two_ranks(info: RankInfo) -> list[RankInfo]:
    return [msgspec.structs.replace(info, rank=rank, local_rank=rank) for rank in range(2)]
