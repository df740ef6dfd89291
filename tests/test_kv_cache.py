"""What the KV cache holds after blocks are moved, and endless contexts, against Transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts
from endless import EndlessReference

from labinfer import LLM, SamplingParams
from labinfer.base.cache_sizes import CacheSizes
from labinfer.base.errors import UserError
from labinfer.base.plan import CacheMove
from labinfer.launch.layout import kv_capacity
from labinfer.models.layers.attention import key_value_spec
from labinfer.models.layers.rope import RopeConfig, RotaryTable
from labinfer.worker.kv_cache import KVCacheManager
from labinfer.worker.step_graphs import CAPTURED_BYTES

BLOCK = 4
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
BLOCKS = pytest.mark.parametrize("block", [BLOCK, 16])  # of the latter the compiled functions have tiles
ROPE = RopeConfig(dim=8, parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position=64)


@pytest.fixture(scope="module", params=["qwen2-tied", "llama-untied"])
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("kv") / request.param, request.param)


# Blocks on a rank.


def test_captured_steps_are_left_room_beside_the_blocks(checkpoint, monkeypatch):
    for room in (0, 1 << 20):
        monkeypatch.setattr(kv_capacity, "free_memory", lambda device, given=0, room=room: CAPTURED_BYTES + room)
        options = {"memory_utilization": 1.0, "block_size": BLOCK, "autotune": False, "weight_cache_size": 0.0}
        if not room:
            with pytest.raises(UserError, match="too little memory for a KV cache"):
                LLM(str(checkpoint), **options)
            continue
        with LLM(str(checkpoint), **options) as llm:
            useful = llm.layout.useful_blocks(llm.options.scheduler.max_num_seqs)
            assert llm.capacity.sizes.num_blocks == room // llm.layout.block_bytes(llm.place) < useful
            assert llm.capacity.captured_bytes == CAPTURED_BYTES


def make_cache(dtype: torch.dtype, block: int) -> tuple[KVCacheManager, RotaryTable, list[torch.Tensor]]:
    """A cache whose blocks 0 to 3 hold random numbers, and all its bytes as they are then."""
    generator = torch.Generator().manual_seed(0)
    rotary = RotaryTable(ROPE, 64, torch.float32, torch.device("cpu"))
    cache = KVCacheManager(
        [key_value_spec(3, 16, ROPE, tiled=True)] * 2,
        CacheSizes(num_blocks=6, num_host_blocks=2, max_model_len=64),
        block_size=block,
        dtype=dtype,
        device=torch.device("cpu"),
        rotary_table=lambda rope: rotary,
    )
    for layer in cache.layers:
        for tensor in layer.tensors():
            if dtype == torch.int8 and tensor.dtype == torch.int8:
                tensor.copy_(torch.randint(-127, 128, tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return cache, rotary, [tensor.clone() for layer in cache.layers for tensor in layer.tensors()]


def tensors_of(cache: KVCacheManager) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in layer.tensors()]


@BLOCKS
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_copy_is_exact(dtype, block):
    cache, rotary, before = make_cache(dtype, block)
    assert cache.layers[0].is_tiled == (block == 16)
    cache.move([CacheMove("copy", [0, 2], [4, 5])])
    for tensor, old in zip(tensors_of(cache), before, strict=True):
        assert torch.equal(tensor[[4, 5]], old[[0, 2]]) and torch.equal(tensor[:4], old[:4])


@BLOCKS
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_goes_to_the_host_comes_back_exactly(dtype, block):
    cache, rotary, before = make_cache(dtype, block)
    cache.move([CacheMove("swap_out", [1, 3], [1, 0]), CacheMove("copy", [0, 0], [1, 3])])
    cache.move([CacheMove("swap_in", [0, 1], [4, 5])])
    for tensor, old in zip(tensors_of(cache), before, strict=True):
        assert torch.equal(tensor[[5, 4]], old[[1, 3]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.int8, 0.03)])
@pytest.mark.parametrize("in_place", [True, False])
@BLOCKS
def test_shifted_keys_are_those_of_their_new_positions(dtype, tolerance, in_place, block):
    """The first 8 numbers of keys that were rotated for positions 20 and on, moved down by 12, are those for 8 and on."""
    cache, rotary, _ = make_cache(dtype, block)
    count = 2 * block
    plain_SKP = torch.randn(count, 3, 16, generator=torch.Generator().manual_seed(1))

    def rotated(first: int) -> torch.Tensor:
        turned_SKP = [rotary.turn(plain_SKP[i : i + 1, :, :8], first + i) for i in range(count)]
        return torch.cat([torch.cat(turned_SKP), plain_SKP[..., 8:]], dim=-1)

    far = torch.tensor([0, 1])
    for layer in cache.layers:
        layer.keys.store(rotated(20), torch.arange(count))
    values = [layer.values.load(far, torch.float32) for layer in cache.layers]
    dest = [0, 1] if in_place else [4, 5]
    cache.move([CacheMove("copy", [0, 1], dest, -12)])
    wanted_SKP = rotated(8)
    for layer, value in zip(cache.layers, values, strict=True):
        got_SKP = layer.keys.load(torch.tensor(dest), torch.float32)
        assert torch.allclose(got_SKP, wanted_SKP, atol=tolerance * wanted_SKP.abs().max().item())
        assert torch.equal(layer.values.load(torch.tensor(dest), torch.float32), value)


# Endless contexts.


@pytest.mark.parametrize(("context", "keep", "kept", "dropped"), [(32, 0, 0, 16), (42, 5, 8, 16)])
def test_endless_context_is_that_of_transformers_cache(checkpoint, context, keep, kept, dropped):
    prompts = [mixed_prompts()[2], mixed_prompts()[4]]
    wanted = [EndlessReference(checkpoint, context, kept, dropped).generate(prompt, 100) for prompt in prompts]
    options = {"max_model_len": context, "context_shift": True, "keep": keep, "block_size": BLOCK}
    with LLM(str(checkpoint), num_kv_blocks=60, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=100, ignore_eos=True, logprobs=0))
    for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
        assert output.token_ids == tokens
        got = [one.logprob for one in output.completions[0].logprobs]
        assert got == pytest.approx(logprobs, abs=1e-4)


PARAMS = [
    SamplingParams(max_tokens=60 + index, ignore_eos=True, temperature=index % 2 * 0.8, seed=index, max_context_len=40)
    for index in range(8)
]
ENDLESS = {"context_shift": True, "block_size": BLOCK}
ENDLESS_PROMPTS = [[3 + index, *mixed_prompts()[index % 8][:30]] for index in range(8)]


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 24, "preemption_mode": "recompute"},
        {"num_kv_blocks": 24, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"num_kv_blocks": 24, "preemption_mode": "swap", "swap_space": 0.001},
        {"num_kv_blocks": 24, "preemption_mode": "swap", "swap_space": 0.0001},
        {"num_kv_blocks": 100, "max_num_batched_tokens": 7, "chunked_prefill_size": 3},
    ],
    ids=str,
)
def test_endless_contexts_do_not_depend_on_room_or_chunks(checkpoint, options):
    """Where one is computed again, the same tokens leave its context at the same places."""
    with LLM(str(checkpoint), num_kv_blocks=400, **ENDLESS) as llm:
        expected = [output.token_ids for output in llm.generate(ENDLESS_PROMPTS, PARAMS)]
    with LLM(str(checkpoint), **ENDLESS, **options) as llm:
        assert [output.token_ids for output in llm.generate(ENDLESS_PROMPTS, PARAMS)] == expected
        assert (llm.report.counts["preemptions"] > 0) == (options["num_kv_blocks"] == 24)
        assert (llm.report.counts["swaps"] > 0) == (options.get("preemption_mode") == "swap")


def test_without_a_shift_the_context_ends_an_answer(checkpoint):
    with LLM(str(checkpoint), num_kv_blocks=60, max_model_len=32, block_size=BLOCK) as llm:
        whole, short = llm.generate([[5, 6, 7]] * 2, [SamplingParams(max_tokens=99, ignore_eos=True), PARAMS[0]])
        limited = llm.generate([5, 6, 7], SamplingParams(max_tokens=99, ignore_eos=True, max_context_len=10))[0]
    assert (len(whole.token_ids), whole.finish_reason) == (29, "length")
    assert len(short.token_ids) == 29
    assert (limited.token_ids, limited.finish_reason) == (whole.token_ids[:7], "length")


def test_context_too_short_is_refused(checkpoint):
    with LLM(str(checkpoint), num_kv_blocks=60, context_shift=True, keep=10, block_size=BLOCK) as llm:
        with pytest.raises(
            UserError, match=r"context length of 16 tokens is too short .* keep 10 and two blocks of 4 need 20"
        ):
            llm.generate([5, 6, 7], SamplingParams(max_context_len=16))
    with LLM(str(checkpoint), num_kv_blocks=3, block_size=BLOCK) as llm:
        with pytest.raises(UserError, match=r"length is 12 tokens\. .* has 12 tokens, and at most 11 leave space"):
            llm.generate(list(range(3, 15)))
        with pytest.raises(UserError, match=r"length is 5 tokens\. .* has 5 tokens, and at most 4 leave space"):
            llm.generate([5] * 5, SamplingParams(max_context_len=5))


# Preemption.


def test_more_swap_space_than_memory_is_refused(checkpoint):
    with pytest.raises(UserError, match=r"swap_space 1e\+06 GiB exceeds the .* GiB of free memory"):
        LLM(str(checkpoint), num_kv_blocks=8, swap_space=1e6)


def test_answers_do_not_depend_on_which_of_swapping_and_computing_again_is_cheaper(checkpoint):
    with LLM(str(checkpoint), num_kv_blocks=400, block_size=BLOCK) as llm:
        expected = [output.token_ids for output in llm.generate(ENDLESS_PROMPTS, PARAMS)]
    with LLM(str(checkpoint), num_kv_blocks=40, block_size=BLOCK, swap_space=0.001) as llm:
        assert llm.spec.step_times.swapped_block > 0
        assert [output.token_ids for output in llm.generate(ENDLESS_PROMPTS, PARAMS)] == expected
        assert llm.report.counts["preemptions"] > 0
