"""The cache of keys and values in each number type: what comes back of what was written, and how many bytes it takes."""

from __future__ import annotations

import pytest
import torch

from labinfer.base.cache_sizes import CacheSizes
from labinfer.engine.cache_capacity import BlockRoom
from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.attention_heads import AttentionHeads
from labinfer.functions.layer_cache import LayerCache, quantize
from labinfer.functions.reference.attention import paged_attention, write_kv
from labinfer.functions.reference.elementwise import rotary
from labinfer.models.layers.attention import key_value_spec
from labinfer.worker.kv_cache import KVCacheManager

CPU = torch.device("cpu")
NUM_KV, HEAD = 2, 16
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


@pytest.fixture(params=[4, 16, 32])
def block(request) -> int:
    """Of the larger ones bfloat16 and int8 caches are in tiles."""
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def cache_of(dtype: torch.dtype, block: int, num_blocks: int = 8, num_layers: int = 1) -> KVCacheManager:
    return KVCacheManager(
        [key_value_spec(NUM_KV, HEAD, None, tiled=True)] * num_layers,
        CacheSizes(num_blocks=num_blocks, max_model_len=64),
        block_size=block,
        dtype=dtype,
        device=CPU,
        rotary_table=lambda rope: None,
    )


def filled(
    dtype: torch.dtype, k_SKP: torch.Tensor, v_SKP: torch.Tensor, blocks: torch.Tensor, block: int
) -> LayerCache:
    """A cache whose ``blocks`` hold these tokens in order."""
    (cache,) = cache_of(dtype, block).layers
    positions = torch.arange(len(k_SKP))
    write_kv(k_SKP, v_SKP, cache, blocks[positions // block] * block + positions % block)
    return cache


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 3e4])
def test_int8_is_within_half_a_scale(magnitude):
    x_TKP = torch.randn(50, NUM_KV, HEAD) * magnitude * torch.logspace(-3, 0, 50).view(-1, 1, 1)
    numbers, scale_TK = quantize(x_TKP)
    error = (numbers * scale_TK.unsqueeze(-1) - x_TKP).abs()
    assert (error <= scale_TK.unsqueeze(-1) * 0.50001).all()
    torch.testing.assert_close(scale_TK, x_TKP.abs().amax(-1) / 127)
    assert (numbers.abs().amax(-1) == 127).all()  # the whole range is used


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40])
def test_int8_of_next_to_nothing_is_finite(value):
    x = torch.full((1, HEAD), value)
    numbers, scale = quantize(x)
    assert scale.isfinite().all() and (numbers.abs() <= 127).all()
    assert ((numbers * scale.unsqueeze(-1) - x).abs() <= scale.unsqueeze(-1) / 2).all()
    if value == 0.0:
        assert not numbers.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_int8_does_not_hide_what_is_not_finite(value, block):
    x_SKP = torch.randn(block, NUM_KV, HEAD)
    x_SKP[1, 0, 3] = value
    cache, blocks = filled(torch.int8, x_SKP, x_SKP, torch.tensor([0]), block), torch.tensor([0])
    back = cache.keys.load(blocks, torch.float32)
    assert not back[1, 0].isfinite().any()
    assert back[1, 1].isfinite().all() and back[0].isfinite().all()


def test_int8_of_one_token_and_head_does_not_depend_on_others():
    x_TKP = torch.randn(6, NUM_KV, HEAD)
    numbers, scale = quantize(x_TKP)
    alone = quantize(x_TKP[3:4, 1:] * 1.0)
    assert torch.equal(numbers[3:4, 1:], alone[0]) and torch.equal(scale[3:4, 1:], alone[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_read_is_what_was_written_rounded(dtype, query_dtype, block):
    k_SKP, v_SKP = torch.randn(2, 3 * block, NUM_KV, HEAD).to(query_dtype)
    blocks = torch.tensor([5, 0, 6])
    cache = filled(dtype, k_SKP, v_SKP, blocks, block)
    for pool, x_SKP in ((cache.keys, k_SKP), (cache.values, v_SKP)):
        if dtype == torch.int8:
            numbers, scale = quantize(x_SKP)
            expected = (numbers * scale.unsqueeze(-1)).to(query_dtype)
        else:
            expected = x_SKP.to(dtype).to(query_dtype)
        back = pool.load(blocks, query_dtype)
        assert back.dtype == query_dtype and torch.equal(back, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_can_be_turned_in_place(dtype, block):
    """As a context shift does; the other blocks and all values stay."""
    k_SKP, v_SKP = torch.randn(2, 3 * block, NUM_KV, HEAD)
    blocks, turned_blocks = torch.tensor([5, 0, 6]), torch.tensor([6, 5])
    cache = filled(dtype, k_SKP, v_SKP, blocks, block)
    before, values = cache.keys.load(blocks, torch.float32), cache.values.load(blocks, torch.float32)
    angles = torch.randn(1, HEAD // 2).repeat(2 * block, 2)
    turned = rotary(cache.keys.load(turned_blocks, torch.float32), angles.cos(), angles.sin())
    cache.keys.store(turned, (turned_blocks.unsqueeze(1) * block + torch.arange(block)).flatten())
    steps = turned.abs().amax(-1, keepdim=True)
    error = (cache.keys.load(turned_blocks, torch.float32) - turned).abs() / steps
    assert (
        error.max() <= {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.int8: 0.51 / 127}[dtype]
    )
    assert torch.equal(cache.keys.load(blocks[1:2], torch.float32), before[block : 2 * block])
    assert torch.equal(cache.values.load(blocks, torch.float32), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_is_its_rows_of_all_tensors(dtype, block):
    k_SKP, v_SKP = torch.randn(2, 2 * block, NUM_KV, HEAD)
    blocks = torch.tensor([1, 4])
    cache = filled(dtype, k_SKP, v_SKP, blocks, block)
    assert len(cache.tensors()) == (4 if dtype == torch.int8 else 2)
    for tensor in cache.tensors():
        tensor[7] = tensor[4]
    copied = torch.tensor([1, 7])
    for pool in (cache.keys, cache.values):
        assert torch.equal(pool.load(copied, torch.float32), pool.load(blocks, torch.float32))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 0.0), (torch.float16, 1.2e-3), (torch.bfloat16, 1e-2), (torch.int8, 2e-2)],
    ids=str,
)
def test_attention_over_a_small_number_type_is_close(dtype, tolerance, block):
    """Measured: float16 0.0006, bfloat16 0.0050, int8 0.0104, where values are around 1; the bounds are twice that."""
    k_SKP, v_SKP = torch.randn(2, 5 * block, NUM_KV, HEAD)
    blocks, q_THP = torch.tensor([5, 0, 6, 2, 3]), torch.randn(7, 4, HEAD)
    length, heads = 5 * block - 1, AttentionHeads(torch.tensor([0, 2, 4]), HEAD**-0.5)
    batch = AttentionBatch.build([0, 7], [length], [blocks.tolist()], CPU)
    out, exact = (
        paged_attention(q_THP, filled(kept, k_SKP, v_SKP, blocks, block), batch, heads)
        for kept in (dtype, torch.float32)
    )
    error = float((out - exact).abs().max())
    assert error <= tolerance
    assert (error == 0) == (dtype == torch.float32)  # the cache was really in that type


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_bytes_are_the_bytes_of_the_pools(dtype, block):
    manager = cache_of(dtype, block, num_blocks=3, num_layers=2)
    held = sum(tensor.nbytes for layer in manager.layers for tensor in layer.tensors())
    assert held == 3 * 2 * block * key_value_spec(NUM_KV, HEAD, None).bytes_per_token(dtype)
    pointers = {tensor.data_ptr() for layer in manager.layers for tensor in layer.tensors()}
    assert len(pointers) == sum(len(layer.tensors()) for layer in manager.layers)
    for layer in manager.layers:
        tiled = block > 4
        assert layer.is_tiled == tiled and layer.block_size == block
        assert layer.k.shape == ((3, NUM_KV, block // 16, HEAD // 2, 16, 2) if tiled else (3, block, NUM_KV, HEAD))
        assert layer.v.shape == ((3, NUM_KV, block // 2, HEAD, 2) if tiled else (3, block, NUM_KV, HEAD))


def test_int8_has_room_for_more_blocks():
    def blocks(dtype: torch.dtype) -> int:
        block_bytes = 24 * 16 * key_value_spec(2, 64, None).bytes_per_token(dtype)
        return BlockRoom(num_bytes=1 << 29, block_bytes=block_bytes).whole_blocks(10**9)

    assert blocks(torch.float32) == (1 << 29) // (24 * 2 * 16 * 2 * 64 * 4)
    assert blocks(torch.bfloat16) == 2 * blocks(torch.float32)
    assert blocks(torch.int8) == (1 << 29) // (24 * 2 * 16 * 2 * (64 + 4))  # 3.76 times as many
