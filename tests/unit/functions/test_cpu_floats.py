"""Compiled functions for float32 and float16 against exact ones: products, rows of packed tables, norms, activations, positions."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.attention_heads import HeadNorms, QKVHeads
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.layer_cache import LayerCache, quantize
from labinfer.functions.reference import attention, elementwise
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.launch.providers import make_registry
from labinfer.native import compiler

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11}
"""Half of the step between numbers, relative to them."""


@pytest.fixture(params=list(ROUNDING), ids=str)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def cpu(compiled_functions, dtype) -> CpuFunctions:
    return CpuFunctions(compiled_functions, dtype=dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_near(got: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """``exact`` is float64; so many roundings to the dtype, and a few to float32 before them."""
    bound = roundings * ROUNDING[got.dtype] + 16 * ROUNDING[torch.float32]
    torch.testing.assert_close(got.double(), exact, rtol=bound, atol=bound * float(exact.abs().mean()))


@pytest.mark.pairwise
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 13, 14, 40, 241, 500])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(32, 16), (64, 128), (31, 6), (70, 131), (33, 257), (1, 1), (65, 1000)]
)
def test_linear_is_as_near_as_its_sums(cpu, dtype, tokens, outputs, inputs):
    for biased in (False, True):
        x, weight = torch.randn(tokens, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
        bias = torch.randn(outputs, dtype=dtype) if biased else None
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        packed = cpu.pack_weight(weight.clone())
        got = cpu.linear(x, packed, bias)
        sums = 4 * ROUNDING[torch.float32] * inputs**0.5 * min(inputs, 256) ** 0.5  # of 256 at most, then of these
        torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=sums)
        assert torch.equal(cpu.linear(x.repeat(1, 2)[:, :inputs], packed, bias), got)  # rows that are apart


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 300), (96, 1100), (40, 64)])
def test_row_is_the_same_whatever_stands_beside_it(cpu, dtype, outputs, inputs):
    """On any number of threads."""
    weight, x = cpu.pack_weight(torch.randn(outputs, inputs, dtype=dtype)), torch.randn(500, inputs, dtype=dtype)
    with threads_of_torch(1):
        alone = torch.cat([cpu.linear(x[i : i + 1], weight) for i in range(len(x))])
    for threads in (1, 2, 5):
        with threads_of_torch(threads):
            for rows in (2, 7, 30, 239, 241, 500):
                assert torch.equal(cpu.linear(x[:rows], weight), alone[:rows]), (threads, rows)


def test_numbers_that_are_not_finite_and_denormal_ones_stay(compiled_functions):
    cpu = CpuFunctions(compiled_functions, dtype=torch.float16)
    x = torch.tensor([[1.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0], [65504.0, 65504.0]]).half()
    weight = torch.full((33, 2), 2.0**-24).half()
    weight[0] = 1
    got = cpu.linear(x, cpu.pack_weight(weight.clone()))
    assert got[0, 1] == 2.0**-24 and got[1, 0] == got[3, 0] == float("inf") and got[2].isnan().all()
    assert torch.equal(got[:, 32], got[:, 1]) or got[2].isnan().all()  # that after the last panel, too
    assert got[0, 32] == 2.0**-24 and got[1, 32] == float("inf")


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (70, 131), (31, 7)])
def test_embedding_finds_rows(cpu, dtype, outputs, inputs):
    table = torch.randn(outputs, inputs, dtype=dtype)
    ids = torch.tensor([9, 10, 10 + outputs - 1, 10 + outputs, 11])
    rows = cpu.embedding(ids, cpu.pack_weight(table.clone()), 10)
    zeros = torch.zeros(inputs, dtype=dtype)
    assert torch.equal(rows, torch.stack([zeros, table[0], table[-1], zeros, table[1 % outputs]]))


@pytest.mark.parametrize("size", [16, 896, 5, 40])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("is_wide", [False, True])
def test_add_rms_norm(cpu, dtype, tokens, size, is_wide):
    hidden, delta = torch.randn(tokens, size, dtype=dtype) * 3, torch.randn(tokens, size, dtype=dtype)
    weight = torch.randn(size, dtype=torch.float32 if is_wide else dtype)
    total, got = cpu.add_rms_norm(hidden.clone(), delta, weight, 1e-5)
    assert torch.equal(total, hidden + delta)
    exact = elementwise.rms_norm(total.double(), weight.double(), 1e-5)
    assert_near(got, exact, roundings=2)
    same, got = cpu.add_rms_norm(total.clone(), None, weight, 1e-5)
    assert torch.equal(same, total)
    assert_near(got, exact, roundings=2)


@pytest.mark.parametrize("function", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("size", [16, 100, 3])
def test_activations(cpu, dtype, function, size):
    gate_up = torch.randn(50, 2 * size, dtype=dtype) * 4
    gate_up[:10, :size] *= 5
    exact = getattr(elementwise, function)(gate_up.double())
    got = getattr(cpu, function)(gate_up)
    # An exponential's error grows with its argument. Below float16's normal numbers steps are of 2^-24, before up and after.
    bound = 3 * ROUNDING[dtype] + 64 * ROUNDING[torch.float32]
    step = 2**-25 * (1 + float(gate_up[:, size:].abs().max())) if dtype == torch.float16 else 1e-7
    torch.testing.assert_close(got.double(), exact, rtol=bound, atol=step)
    large = torch.tensor([[300.0, -300.0, 0.0, -87.0, 88.0, -1.0, 1.0, float("inf")]], dtype=dtype).repeat(1, 4)
    gate_up = torch.cat([large, torch.ones_like(large)], -1)
    expected = getattr(elementwise, function)(gate_up.double())
    torch.testing.assert_close(getattr(cpu, function)(gate_up).double(), expected, rtol=bound, atol=1e-7)
    unknown = torch.full((1, 2 * size), float("nan"), dtype=dtype)
    assert getattr(cpu, function)(unknown).isnan().all()


@pytest.mark.pairwise
@pytest.mark.parametrize("rotated", [0, 8, 24, 32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", ["none", "before", "after", "before, in float32"])
@pytest.mark.parametrize("block", [4, 16])
def test_every_kind_of_rotation_and_cache(cpu, dtype, rotated, interleaved, norms, block):
    tokens, heads, num_kv, size = 5, 6, 2, 32
    qkv, slots = torch.randn(tokens, heads + 2 * num_kv, size, dtype=dtype), torch.randperm(4 * block)[:tokens]
    angles = torch.randn(tokens, rotated // 2)
    angles = angles.repeat_interleave(2, 1) if interleaved else angles.repeat(1, 2)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotated else None
    wide = torch.float32 if norms.endswith("float32") else dtype
    weights = torch.randn(size, dtype=wide), torch.randn(size, dtype=wide)
    own = None if norms == "none" else HeadNorms(*weights, 1e-6, norms == "after")
    exact_norms = None if norms == "none" else HeadNorms(*(w.double() for w in weights), 1e-6, norms == "after")
    exact = LayerCache.zeros(4, block, (num_kv, size), torch.float64)
    exact_tables = tuple(table.double() for table in tables) if rotated else None
    exact_heads, own_heads = (QKVHeads(num_kv, interleaved, each) for each in (exact_norms, own))
    q = attention.rotate_and_write(qkv.double(), exact, slots, exact_tables, exact_heads)
    blocks = torch.arange(4)
    keys = {}
    for kv_dtype in (dtype, torch.float32, torch.bfloat16, torch.int8):
        cache = LayerCache.zeros(4, block, (num_kv, size), kv_dtype, tiled=True)
        assert cache.is_tiled == (block == 16)
        assert_near(cpu.rotate_and_write(qkv, cache, slots, tables, own_heads), q)
        keys[kv_dtype] = cache.keys.load(blocks, torch.float32)
        stored = exact.values.load(blocks, dtype)
        if kv_dtype == torch.int8:
            for got, numbers in ((keys[kv_dtype], keys[dtype]), (cache.values.load(blocks, torch.float32), stored)):
                rounded, scale = quantize(numbers)
                assert torch.equal(got, rounded * scale.unsqueeze(-1))
        else:
            assert torch.equal(cache.values.load(blocks, torch.float32), stored.to(kv_dtype).float())
            assert torch.equal(keys[kv_dtype], keys[dtype].to(kv_dtype).float())
    assert_near(keys[dtype].to(dtype)[slots], exact.keys.load(blocks, torch.float64)[slots])


def test_models_take_them(compiled_functions, dtype):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    functions = registry.select(torch.device("cpu"), dtype)
    weight = torch.randn(40, 8, dtype=dtype)
    packed = functions.matrices["layer"].pack_weight(weight.clone())
    assert not torch.equal(packed.data, weight)  # in panels
    assert functions.tiled_cache
