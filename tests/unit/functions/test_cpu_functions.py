"""The compiled functions against the reference, over sizes that do and do not fill their vectors and panels."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.attention_heads import HeadNorms, QKVHeads
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.layer_cache import LayerCache, quantize
from labinfer.functions.reference import attention, elementwise, linear
from labinfer.native import compiler
from labinfer.native.targets import X86_64_V3, Target

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)


@pytest.fixture(scope="module")
def cpu(compiled_functions) -> CpuFunctions:
    return CpuFunctions(compiled_functions)


@pytest.fixture(scope="module")
def panels(compiled_functions, kernel) -> CpuFunctions:
    """Of each kernel: what goes through panels."""
    return CpuFunctions(compiled_functions, kernel)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def assert_near(got: torch.Tensor, exact: torch.Tensor) -> None:
    """``exact`` is float32: what is rounded once to bfloat16 is within one part in 256, where nothing cancels."""
    torch.testing.assert_close(got.float(), exact, rtol=2**-8, atol=2**-8 * float(exact.abs().mean()))


@pytest.mark.pairwise("kernel")
@pytest.mark.parametrize("tokens", [1, 2, 5, 13, 14, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (64, 6), (31, 32), (96, 130), (100, 64), (1, 2), (33, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(panels, tokens, outputs, inputs, biased):
    x, weight, bias = random(tokens, inputs), random(outputs, inputs), random(outputs) if biased else None
    exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    packed = panels.pack_weight(weight.clone())
    assert_near(panels.linear(x, packed, bias), exact)
    assert_near(panels.linear(x.repeat(1, 2)[:, :inputs], packed, bias), exact)  # rows that are not next to each other


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(300, 7200, 66), (130, 64, 1100), (700, 70, 896)])
def test_linear_of_a_prompt(panels, tokens, outputs, inputs):
    """More than is written through the caches, than is multiplied at once, and than stays near."""
    x, weight, bias = random(tokens, inputs), random(outputs, inputs), random(outputs)
    exact = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    with threads_of_torch(3):
        assert_near(panels.linear(x, panels.pack_weight(weight.clone()), bias), exact)


def test_kernels_have_their_functions(compiled_functions):
    """Nothing is left out by its name: what a kernel lacks would be calculated by another one."""
    products = {"linear", "linear12", "experts", "attend", "attend_latent"}
    others = {"dot": set(), "amx": {"linear_int8", "linear_groups"}}
    for kernel in compiled_functions.kernels[1:]:
        assert all(callable(compiled_functions.find(name, kernel)) for name in products | others[kernel])


@pytest.mark.parametrize("inputs", [1, 5, 37, 513])
def test_linear_with_an_odd_number_of_inputs_has_the_same_bits_alone(panels, inputs):
    x, weight, bias = random(30, inputs), random(70, inputs), random(70)
    packed = panels.pack_weight(weight.clone())
    together = panels.linear(x, packed, bias)
    assert_near(together, torch.nn.functional.linear(x.float(), weight.float(), bias.float()))
    assert all(torch.equal(panels.linear(x[row : row + 1], packed, bias)[0], together[row]) for row in range(30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("inputs", [6, 300, 1026])
def test_outputs_have_the_same_bits_in_a_panel_and_after_the_last_one(compiled_functions, kernel, dtype, inputs):
    """A tensor-parallel rank may have in a partial panel what is in a whole one elsewhere."""
    functions = CpuFunctions(compiled_functions, kernel if dtype == torch.bfloat16 else "", dtype=dtype)
    x, weight, bias = (random(*sizes).to(dtype) for sizes in ((20, inputs), (96, inputs), (96,)))
    whole = functions.linear(x, functions.pack_weight(weight.clone()), bias)
    for outputs in (1, 31, 33, 80):
        for rows in (1, 7, 20):
            packed = functions.pack_weight(weight[:outputs].clone())
            assert torch.equal(functions.linear(x[:rows], packed, bias[:outputs].clone()), whole[:rows, :outputs])


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 16), (50, 8), (31, 2), (70, 5)])
def test_embedding_of_a_packed_table(cpu, outputs, inputs):
    table, ids = random(outputs, inputs), torch.tensor([10, 9, 10 + outputs - 1, 10 + outputs, 12, 12])
    packed = cpu.pack_weight(table.clone())
    assert torch.equal(cpu.embedding(ids, packed, 10), linear.embedding(ids, linear.pack_weight(table), 10))


@pytest.mark.parametrize("size", [16, 896, 5, 40])
@pytest.mark.parametrize("tokens", [1, 7])
def test_add_rms_norm(cpu, tokens, size):
    hidden, delta, weight = random(tokens, size) * 3, random(tokens, size), random(size)
    wanted_sum, wanted = elementwise.add_rms_norm(hidden, delta, weight, 1e-5)
    got_sum, got = cpu.add_rms_norm(hidden.clone(), delta, weight, 1e-5)
    assert torch.equal(got_sum, wanted_sum)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0)  # two roundings
    same, got = cpu.add_rms_norm(wanted_sum.clone(), None, weight, 1e-5)
    assert torch.equal(same, wanted_sum)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("size", [16, 40, 5])
def test_add_rms_norm_with_a_weight_in_float32_rounds_once(cpu, size):
    hidden, weight = random(7, size), 1 + 0.1 * torch.randn(size)
    exact = elementwise.rms_norm(hidden.float(), weight, 1e-5)
    assert_near(elementwise.rms_norm(hidden, weight, 1e-5), exact)
    assert_near(cpu.add_rms_norm(hidden, None, weight, 1e-5)[1], exact)


@pytest.mark.parametrize("size", [16, 100, 3])
def test_silu_and_mul(cpu, size):
    gate_up = random(5, 2 * size) * 20
    torch.testing.assert_close(cpu.silu_and_mul(gate_up), elementwise.silu_and_mul(gate_up), rtol=2**-7, atol=1e-30)
    large = torch.tensor([[300.0, -300.0, 0.0, -87.0, 1.0, 1.0, 1.0, 1.0]], dtype=torch.bfloat16).repeat(1, 4)
    gate_up = torch.cat([large, torch.ones_like(large)], -1)
    torch.testing.assert_close(cpu.silu_and_mul(gate_up), elementwise.silu_and_mul(gate_up), rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("size", [16, 100, 3])
def test_gelu_and_mul(cpu, size):
    gate_up = random(5, 2 * size) * 3
    torch.testing.assert_close(cpu.gelu_and_mul(gate_up), elementwise.gelu_and_mul(gate_up), rtol=2**-7, atol=1e-5)
    large = torch.tensor([[3e38, -3e38, 0.0, -31.0, -30.0, 300.0, 1.0, -1.0]], dtype=torch.bfloat16).repeat(1, 4)
    gate_up = torch.cat([large, torch.ones_like(large)], -1)
    torch.testing.assert_close(cpu.gelu_and_mul(gate_up), elementwise.gelu_and_mul(gate_up), rtol=2**-7, atol=1e-30)
    unknown = torch.full((1, 2 * size), float("nan"), dtype=torch.bfloat16)
    assert cpu.gelu_and_mul(unknown).isnan().all()


def entries(cache: LayerCache) -> tuple[torch.Tensor, ...]:
    """Keys and values of all slots, in float32."""
    blocks = torch.arange(len(cache.k))
    return cache.keys.load(blocks, torch.float32), cache.values.load(blocks, torch.float32)


@pytest.mark.parametrize("block", [4, 16, 32])
@pytest.mark.parametrize(
    ("heads", "num_kv", "size"), [(4, 2, 16), (3, 3, 8), (14, 2, 64), (2, 1, 80), (4, 2, 96), (2, 1, 112)]
)
def test_rotate_and_write(cpu, heads, num_kv, size, block):
    tokens = 6
    qkv, angles = random(tokens, heads + 2 * num_kv, size), torch.randn(tokens, size // 2).repeat(1, 2)
    cos, sin, slots = angles.cos().bfloat16(), angles.sin().bfloat16(), torch.randperm(4 * block)[:tokens]
    caches = [LayerCache.zeros(4, block, (num_kv, size), torch.bfloat16, tiled=True) for _ in "ab"]
    own_heads = QKVHeads(num_kv)
    assert caches[0].is_tiled == (block > 4 and size > 8)
    exact = LayerCache.zeros(4, block, (num_kv, size), torch.float32)
    got = cpu.rotate_and_write(qkv, caches[0], slots, (cos, sin), own_heads)
    wanted = attention.rotate_and_write(qkv.float(), exact, slots, (cos.float(), sin.float()), own_heads)
    assert_near(got, wanted)
    keys, values = entries(caches[0])
    assert_near(keys, entries(exact)[0])
    assert torch.equal(values, entries(exact)[1])
    qkv[2] = 0
    int8 = LayerCache.zeros(4, block, (num_kv, size), torch.int8, tiled=True)
    assert torch.equal(cpu.rotate_and_write(qkv, int8, slots, (cos, sin), own_heads)[3:], got[3:])
    cpu.rotate_and_write(qkv, caches[1], slots, (cos, sin), own_heads)
    for whole, head in zip(entries(int8), entries(caches[1]), strict=True):
        rounded, scale = quantize(head)
        assert torch.equal(whole, rounded * scale.unsqueeze(-1))  # and nothing elsewhere


@pytest.mark.pairwise
@pytest.mark.parametrize("rotated", [0, 8, 24, 32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", ["none", "before", "after", "before, in float32"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("block", [4, 16])
def test_every_kind_of_rotation(cpu, rotated, interleaved, norms, kv_dtype, block):
    """Some dimensions or none, either pairing, with and without norms of the heads: rounded once, as it is in float32."""
    tokens, heads, num_kv, size = 5, 6, 2, 32
    qkv, slots = random(tokens, heads + 2 * num_kv, size), torch.randperm(4 * block)[:tokens]
    angles = torch.randn(tokens, rotated // 2)
    angles = angles.repeat_interleave(2, 1) if interleaved else angles.repeat(1, 2)
    tables = (angles.cos().bfloat16(), angles.sin().bfloat16()) if rotated else None
    q_norm, k_norm = random(size), random(size)
    if norms.endswith("float32"):
        q_norm, k_norm = q_norm + torch.rand(size) / 2**9, k_norm + torch.rand(size) / 2**9
    bfloat16_norms = None if norms == "none" else HeadNorms(q_norm, k_norm, 1e-6, norms == "after")
    exact_norms = None if norms == "none" else HeadNorms(q_norm.float(), k_norm.float(), 1e-6, norms == "after")
    caches = {
        dtype: LayerCache.zeros(4, block, (num_kv, size), dtype, tiled=True)
        for dtype in (torch.float32, torch.bfloat16)
    }
    own_heads = QKVHeads(num_kv, interleaved, bfloat16_norms)
    wide = tuple(table.float() for table in tables) if rotated else None
    exact = attention.rotate_and_write(
        qkv.float(), caches[torch.float32], slots, wide, replace(own_heads, norms=exact_norms)
    )
    assert_near(cpu.rotate_and_write(qkv, caches[torch.bfloat16], slots, tables, own_heads), exact)
    (keys, values), (exact_keys, exact_values) = entries(caches[torch.bfloat16]), entries(caches[torch.float32])
    assert_near(keys, exact_keys)
    assert torch.equal(values, exact_values)
    if kv_dtype == torch.int8:
        int8 = LayerCache.zeros(4, block, (num_kv, size), torch.int8, tiled=True)
        assert_near(cpu.rotate_and_write(qkv, int8, slots, tables, own_heads), exact)
        rounded, scale = quantize(keys)
        assert torch.equal(entries(int8)[0], rounded * scale.unsqueeze(-1))


@pytest.mark.parametrize("norms", ["before", "after"])
@pytest.mark.parametrize("size", [32, 256, 512])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("block", [4, 16])
def test_norms_of_values(cpu, norms, size, kv_dtype, block):
    tokens, num_kv = 5, 2
    qkv, slots = random(tokens, 3 + 2 * num_kv, size), torch.randperm(4 * block)[:tokens]
    caches = [LayerCache.zeros(4, block, (num_kv, size), dtype, tiled=True) for dtype in (torch.float32, kv_dtype)]
    for cache, x in zip(caches, (qkv.float(), qkv), strict=True):
        head_norms = HeadNorms(*torch.ones(2, size, dtype=x.dtype), 1e-6, norms == "after", values=True)
        implementation = attention if x is not qkv else cpu
        implementation.rotate_and_write(x, cache, slots, None, QKVHeads(num_kv, norms=head_norms))
    exact = qkv[:, -num_kv:].float()
    exact *= exact.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    wanted = torch.zeros(4 * block, num_kv, size)
    wanted[slots] = exact
    torch.testing.assert_close(entries(caches[0])[1], wanted)
    if kv_dtype == torch.int8:
        rounded, scale = quantize(wanted.bfloat16())
        assert float((entries(caches[1])[1] - rounded * scale.unsqueeze(-1)).abs().max()) <= 1.01 * float(scale.max())
    else:
        assert_near(entries(caches[1])[1], wanted)


def test_queries_alone_leave_the_cache_as_it_is(cpu):
    qkv, angles = random(3, 4, 32), torch.randn(3, 16).repeat(1, 2)
    cos, sin, norm = angles.cos().bfloat16(), angles.sin().bfloat16(), random(32)
    caches = [LayerCache.zeros(4, 16, (2, 32), torch.bfloat16, tiled=tiled) for tiled in (False, True)]
    wide = QKVHeads(0, norms=HeadNorms(norm.float(), norm.float(), 1e-6))
    exact = attention.rotate_and_write(qkv.float(), caches[0], torch.arange(3), (cos.float(), sin.float()), wide)
    own_heads = QKVHeads(0, norms=HeadNorms(norm, norm, 1e-6, values=True))
    for cache in caches:
        got = cpu.rotate_and_write(qkv, cache, torch.arange(3), (cos, sin), own_heads)
        assert_near(got, exact)
        assert not any(tensor.any() for tensor in cache.tensors())


@pytest.mark.parametrize("level", ["x86-64-v3", pytest.param("x86-64", marks=pytest.mark.slow)])
def test_processors_with_narrower_vectors(load_functions, level):
    """The same source for a smaller processor: vectors of 8 and 4, and 16 of them. All tests run on the first with ``-m slow``."""
    compiled = load_functions(Target(level, "x86_64", (f"-march={level}",), X86_64_V3))
    assert compiled.kernels == ("",)
    narrow = CpuFunctions(compiled)
    for tokens in range(1, 15):
        test_linear(narrow, tokens, 70, 34, True)
