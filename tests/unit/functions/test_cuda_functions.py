"""Kernels in Triton against the reference: where torch has a card of this kind. With ``TRITON_INTERPRET=1``
and Triton installed the kernels are tested on any machine."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from cuda_cases import BOUNDS, DECODES, DEVICE, HAS_CARD, Case, assert_near, make_places, randn

from labinfer.functions.attention_heads import AttentionHeads, HeadNorms, QKVHeads
from labinfer.functions.clamped_gate import ClampedGate
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.latent_cache import LatentCache
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.mamba_heads import MambaHeads
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.functions.reference import attention as reference_attention
from labinfer.functions.reference import delta_rule as reference_delta
from labinfer.functions.reference import elementwise as reference
from labinfer.functions.reference import experts as reference_experts
from labinfer.functions.reference import latent_attention as reference_latent
from labinfer.functions.reference import linear as dense
from labinfer.functions.reference import mamba as reference_mamba
from labinfer.functions.reference import quantized
from labinfer.functions.stacked_experts import StackedExperts
from labinfer.weights.codes import Codes, QuantLayout

DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@pytest.fixture(scope="module")
def kernels():
    """Skips where no kernel runs."""
    if not (HAS_CARD or os.environ.get("TRITON_INTERPRET")):
        pytest.skip("torch has no card of this kind here")


@pytest.fixture(scope="module")
def elementwise(kernels):
    from labinfer.functions.cuda import elementwise

    return elementwise


@pytest.fixture(scope="module")
def paged_attention(kernels):
    from labinfer.functions.cuda.attention import paged_attention

    return paged_attention


@pytest.fixture(scope="module")
def products(kernels):
    from labinfer.functions.cuda.products import CudaProducts

    return CudaProducts(DEVICE)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("size", [1, 48, 896, 3000])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_add_rms_norm(elementwise, dtype, size, wide_weight):
    weight = randn(size, dtype=torch.float32 if wide_weight else dtype)
    for rows in (1, 5):
        hidden, delta = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype)
        for more in (None, delta):
            expected = reference.add_rms_norm(hidden.clone(), more, weight, 1e-6)
            for result, exact in zip(
                elementwise.add_rms_norm(hidden.clone(), more, weight, 1e-6), expected, strict=True
            ):
                assert_near(result, exact, dtype)


@DTYPES
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_activations(elementwise, dtype, name):
    for rows, columns in ((1, 7), (3, 1024), (2, 2500), (0, 8)):
        gate_up = randn(rows, 2 * columns, dtype=dtype)
        expected = getattr(reference, name)(gate_up)
        if rows:
            assert_near(getattr(elementwise, name)(gate_up), expected, dtype)
        else:
            assert getattr(elementwise, name)(gate_up).shape == expected.shape


def make_norms(kind: str, size: int, dtype: torch.dtype) -> HeadNorms | None:
    if kind == "none":
        return None
    q, k = (randn(size, dtype=torch.float32 if kind == "wide" else dtype) for _ in range(2))
    return HeadNorms(q, k, 1e-6, after_rotation=kind == "after", values=kind == "values")


@pytest.mark.pairwise
@DTYPES
@pytest.mark.parametrize("norms", ["none", "before", "after", "values", "wide"])
@pytest.mark.parametrize(
    ("size", "rotated", "interleaved"),
    [(64, 64, False), (64, 32, True), (80, 20, False), (8, 8, True), (256, 0, False)],
)
@pytest.mark.parametrize("kv_dtype", ["same", "int8", "tiles"])
def test_rotate_and_write(elementwise, dtype, norms, size, rotated, interleaved, kv_dtype):
    rows, num_queries, block = 6, 6, 16
    slots = torch.randperm(4 * block, device=DEVICE)[:rows]
    for num_kv in (2, 0):
        qkv = randn(rows, num_queries + 2 * num_kv, size, dtype=dtype)
        angles = torch.rand(rows, rotated, device=DEVICE) * 6 if rotated else None
        tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotated else None
        heads = QKVHeads(num_kv, interleaved, make_norms(norms, size, dtype))
        caches = [
            LayerCache.zeros(
                4,
                block,
                (2, size),
                torch.int8 if kv_dtype == "int8" else dtype,
                device=DEVICE,
                tiled=kv_dtype == "tiles",
            )
            for _ in range(2)
        ]
        exact = reference_attention.rotate_and_write(qkv.clone(), caches[0], slots, tables, heads)
        assert_near(elementwise.rotate_and_write(qkv, caches[1], slots, tables, heads), exact, dtype)
        blocks = torch.arange(4, device=DEVICE)
        for expected, pool in zip(*((cache.keys, cache.values) for cache in caches), strict=True):
            bound = torch.bfloat16 if kv_dtype == "int8" else dtype
            assert_near(pool.load(blocks, torch.float32), expected.load(blocks, torch.float32), bound)


MIXED = [(40, 40), (9, 1), (300, 21), (65, 65), (5, 2)]
LONG = [(3000, 1)]


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [DECODES, MIXED, LONG, [(700, 6)]], ids=["decodes", "mixed", "long", "drafts"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv", "size"), [(14, 2, 64), (4, 4, 8), (6, 2, 80), (8, 1, 128), (2, 1, 256), (40, 1, 16)]
)
@pytest.mark.parametrize(
    ("window", "sinks", "cap"), [(0, False, 0.0), (5, False, 2.0), (64, True, 0.0), (0, True, 2.0)]
)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "block"),
    [
        (torch.float32, torch.float32, 4),
        (torch.bfloat16, torch.bfloat16, 16),
        (torch.float16, torch.int8, 32),
        (torch.float32, torch.bfloat16, 16),
    ],
    ids=str,
)
def test_paged_attention(paged_attention, lengths, num_heads, num_kv, size, window, sinks, cap, dtype, kv_dtype, block):
    if dtype == torch.bfloat16 and not HAS_CARD:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    case = Case(lengths, (num_kv, size), block, kv_dtype)
    q = randn(case.rows, num_heads, size, dtype=dtype)
    head_ptr = torch.arange(num_kv + 1) * (num_heads // num_kv)
    sinks_H = torch.randn(num_heads, device=DEVICE) if sinks else None
    heads = AttentionHeads(head_ptr, size**-0.5, window, sinks_H, cap)
    exact = reference_attention.paged_attention(q, case.cache, case.batch, heads)
    assert_near(paged_attention(q, case.cache, case.batch, heads), exact, dtype)


def test_heads_that_read_unevenly_are_the_references(paged_attention):
    case = Case(MIXED, (2, 16), 4, torch.float32)
    q, heads = randn(case.rows, 5, 16, dtype=torch.float32), AttentionHeads(torch.tensor([0, 2, 5]), 0.25)
    exact = reference_attention.paged_attention(q, case.cache, case.batch, heads)
    assert torch.equal(paged_attention(q, case.cache, case.batch, heads), exact)


@pytest.mark.pairwise
@pytest.mark.parametrize("contexts", [[1, 70, 300], [2500], [5] * 20], ids=["few", "long", "many"])
@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize(("heads", "rank", "rotated", "nope"), [(16, 512, 64, 128), (5, 32, 8, 16), (40, 96, 16, 24)])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "same"), ("bfloat16", "same"), ("float16", "int8")])
def test_latent_attention(kernels, contexts, num_new, heads, rank, rotated, nope, dtype, kv_dtype):
    from labinfer.functions.cuda.latent import latent_attention

    dtype = getattr(torch, dtype)
    if dtype == torch.bfloat16 and not HAS_CARD:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    contexts = [context + num_new - 1 for context in contexts]
    batch, slots = make_places(contexts, [num_new] * len(contexts), 16)
    pool = torch.full((len(batch.tables_N) + 1, 16, rank + rotated), float("nan"), device=DEVICE).to(dtype)
    cache = LatentCache(latent=pool, rank=rank)
    if kv_dtype == "int8":
        scales = torch.zeros(len(pool), 16, 2, device=DEVICE)
        cache = LatentCache(latent=torch.zeros_like(pool, dtype=torch.int8), latent_scale=scales, rank=rank)
    for each in slots:
        cache.latents.store(torch.randn(len(each), rank, device=DEVICE), each)
        cache.keys.store(torch.randn(len(each), rotated, device=DEVICE), each)
    q = randn(num_new * len(contexts), heads, nope + rotated, dtype=dtype)
    weight = (torch.randn(heads, nope + 48, rank, device=DEVICE) * rank**-0.5).to(dtype)
    arguments = (q, cache, batch, weight, (nope + rotated) ** -0.5)
    assert_near(latent_attention(*arguments), reference_latent.latent_attention(*arguments), dtype)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 3, 2]], ids=str)
@pytest.mark.parametrize(("key_heads", "group", "key_size", "value_size"), [(2, 2, 128, 128), (3, 1, 16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_rule(kernels, new, key_heads, group, key_size, value_size, dtype):
    from labinfer.functions.cuda import delta_rule

    contexts = [new[0], 9, 20]  # the first sequence has no earlier tokens
    batch, _ = make_places(contexts, new, 16)
    batch, num_heads = replace(batch, state_slots_B=torch.tensor([4, 0, 2], device=DEVICE)), key_heads * group
    channels = 2 * key_heads * key_size + num_heads * value_size
    wide = randn(sum(new), channels + 5, dtype=dtype)
    x, weight = wide[:, :channels], torch.randn(4, channels, device=DEVICE)
    before = torch.randn(6, 3, channels, device=DEVICE).to(dtype)
    states = [before.clone(), before.clone()]
    for bias in (None, torch.randn(channels, device=DEVICE)):
        mixed = reference_delta.causal_conv(x, weight, states[0], batch, bias)
        assert_near(delta_rule.causal_conv(x, weight, states[1], batch, bias), mixed, dtype)
        assert torch.equal(*states)
    before = torch.randn(6, num_heads, key_size, value_size, device=DEVICE)
    states = [before.clone(), before.clone()]
    rate_H, bias_H = torch.rand(num_heads, device=DEVICE), torch.randn(num_heads, device=DEVICE) * 10
    heads = DeltaHeads(rate_H, bias_H, torch.arange(num_heads) // group)
    gates = randn(sum(new), 2 * num_heads, dtype=dtype)
    exact = reference_delta.delta_rule(mixed, gates, states[0], batch, heads)
    assert_near(delta_rule.delta_rule(mixed, gates, states[1], batch, heads), exact, dtype)
    assert_near(states[1], states[0], torch.float32)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 3, 2]], ids=str)
@pytest.mark.parametrize(
    ("groups", "shared", "state_size", "head_size"), [(2, 2, 128, 64), (3, 1, 16, 24), (1, 5, 19, 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selective_scan(kernels, new, groups, shared, state_size, head_size, dtype):
    from labinfer.functions.cuda import mamba

    batch, _ = make_places([new[0], 9, 20], new, 16)  # the first sequence has no earlier tokens
    batch, num_heads = replace(batch, state_slots_B=torch.tensor([4, 0, 2], device=DEVICE)), groups * shared
    xbc = randn(sum(new), num_heads * head_size + 2 * groups * state_size, dtype=dtype)
    dt = randn(sum(new), num_heads + 3, dtype=dtype)[:, 3:]
    rate_H, bias_H, skip_H = (torch.rand(num_heads, device=DEVICE) * factor for factor in (2, 5, 1))
    each = {"rate_H": rate_H, "bias_H": bias_H, "skip_H": skip_H, "groups_H": torch.arange(num_heads) // shared}
    heads = MambaHeads(**each, min_dt=0.01, max_dt=4.0)
    before = torch.randn(6, num_heads, state_size, head_size, device=DEVICE)
    states = [before.clone(), before.clone()]
    exact = reference_mamba.selective_scan(xbc, dt, states[0], batch, heads)
    assert_near(mamba.selective_scan(xbc, dt, states[1], batch, heads), exact, dtype)
    assert_near(states[1], states[0], torch.float32)


def make_weight(kind: str, outputs: int, inputs: int, dtype: torch.dtype):
    """A matrix rounded here, or as a checkpoint may hold it."""
    matrix = torch.randn(outputs, inputs, device=DEVICE).to(dtype)
    if kind == "dense":
        return dense.pack_weight(matrix)
    if kind == "int8":
        return quantized.quantize_int8(matrix)
    name, _, group = kind.partition("/")
    if name == "int4":
        return quantized.quantize_int4(matrix, int(group))
    bits, groups = (8 if name == "codes8" else 4), -(-inputs // int(group))
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (outputs, groups * int(group) * bits // 32), device=DEVICE)
    scales = torch.rand(outputs, groups, device=DEVICE) * 0.02 + 0.01
    zeros = torch.randint(0, 1 << bits, (outputs, groups), device=DEVICE).to(torch.uint8) if name != "iq4" else None
    minima = -torch.rand(outputs, groups, device=DEVICE) if name == "minima" else None
    codes = Codes(
        form=QuantLayout(bits, int(group), table="iq4" if name == "iq4" else ""),
        columns=(0, inputs),
        words=words.to(torch.int32),
        scales=scales,
        zeros=None if minima is not None else zeros,
        minima=minima,
    )
    return quantized.pack_codes(codes, dtype)


WEIGHTS = ["int8", "int4/64", "int4/32", "codes8/128", "codes4/128", "minima/32", "iq4/32", "codes4/256"]


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 33, 100, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 256), (200, 1000), (64, 96), (1000, 2304)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_with_codes(products, kind, dtype, rows, outputs, inputs, has_bias):
    """Beside those with the matrix that they stand for."""
    if dtype == torch.bfloat16 and not HAS_CARD:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    weight = make_weight(kind, outputs, inputs, dtype)
    x, bias = randn(rows, inputs, dtype=dtype), randn(outputs, dtype=dtype) if has_bias else None
    exact = torch.nn.functional.linear(x.float(), quantized.dequantize(weight), None if bias is None else bias.float())
    assert_near(products.linear(x, weight, bias), exact.to(dtype), dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["dense", "int8", "int4/64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 150])
@pytest.mark.parametrize(("num_experts", "first"), [(8, 0), (3, 2)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped"])
@pytest.mark.parametrize("most", [512, 0], ids=["one by one", "sorted"])
def test_experts(products, monkeypatch, kind, dtype, rows, num_experts, first, activation, most):
    from labinfer.functions.cuda import experts as cuda_experts

    if dtype == torch.bfloat16 and not HAS_CARD:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    monkeypatch.setattr(cuda_experts, "MAX_PAIRS", most)
    size, columns, each = 96, 160, 3
    packers = {"dense": dense.pack_weight, "int8": quantized.quantize_int8}
    pack = packers.get(kind, lambda matrix: quantized.quantize_int4(matrix, 64))
    linear = dense.linear if kind == "dense" else exact_linear
    held = StackedExperts(pack, linear, None, ExpertShape(num_experts, size, (0, columns), dtype), DEVICE)
    for index in range(num_experts):
        held.pack(index, randn(2 * columns, size, dtype=dtype), randn(size, columns, dtype=dtype))
    x = randn(rows, size, dtype=dtype)
    ids = torch.stack([torch.randperm(8, device=DEVICE)[:each] for _ in range(rows)])
    clamped = None
    if activation == "clamped":
        gate, up, down = (torch.randn(num_experts, n, device=DEVICE) for n in (columns, columns, size))
        clamped = ClampedGate(alpha=1.7, limit=7.0, gate_limit=7.0, gate_EF=gate, up_EF=up, down_ED=down)
    weights = torch.rand(rows, each, device=DEVICE)
    mlps = ExpertMLPs(held, first, clamped, gelu=activation == "gelu")
    exact = reference_experts.experts(x, ids, weights, mlps)
    for mine in (mlps, replace(mlps, packed=held.clone())):
        assert_near(cuda_experts.experts(products, x, ids, weights, mine), exact, dtype)


def exact_linear(x, weight):
    """Without the inputs' rounding to 8 bits."""
    return torch.nn.functional.linear(x.float(), quantized.dequantize(weight)).to(x.dtype)
