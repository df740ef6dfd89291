"""Functions for Ascend NPUs against the reference, by a stand-in for torch_npu that refuses calls its pages do not allow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import stub_torch_npu as ops
import torch
from npu_cases import BOUNDS, assert_near, randn
from stub_torch_npu import LimitError

from labinfer.functions.attention_heads import HeadNorms, QKVHeads
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.npu import elementwise, experts, products, route
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.functions.reference import attention as reference_attention
from labinfer.functions.reference import elementwise as reference
from labinfer.functions.reference import experts as reference_experts
from labinfer.functions.reference import linear as dense
from labinfer.functions.reference import quantized
from labinfer.functions.reference import route as reference_route
from labinfer.functions.routing_rule import RouterWeights, RoutingRule
from labinfer.functions.stacked_experts import StackedExperts
from labinfer.weights.codes import Codes, QuantLayout

DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
OWN = elementwise.NpuElementwise(ops)
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 48), (2, 896), (0, 16)])
def test_add_rms_norm(calls, dtype, wide_weight, rows, size):
    weight = randn(size, dtype=torch.float32 if wide_weight else dtype)
    hidden, delta = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype)
    for more in (None, delta):
        results = OWN.add_rms_norm(hidden.clone(), more, weight, 1e-6)
        expected = reference.add_rms_norm(hidden.clone(), more, weight, 1e-6)
        for result, exact in zip(results, expected, strict=True):
            if rows:
                assert_near(result, exact, dtype)
            assert result.shape == exact.shape
    fused = "npu_rms_norm" if wide_weight and dtype != torch.float32 else "npu_add_rms_norm"
    assert calls == ["npu_rms_norm", fused] * bool(rows)


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (3, 1024), (0, 8), (4, 0)])
def test_silu_and_mul(calls, dtype, rows, columns):
    gate_up = randn(rows, 4 * columns, dtype=dtype)[:, : 2 * columns]  # rows are strided
    assert_near(OWN.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), dtype)
    assert calls == ["npu_swiglu"] * bool(rows and columns)


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
    [(64, 64, False), (64, 32, True), (80, 20, False), (8, 8, True), (256, 0, False), (1024, 896, False)],
)
@pytest.mark.parametrize("pool", ["same", "int8", "tiles", "bfloat16"])
@pytest.mark.parametrize("rows", [6, 0])
def test_rotate_and_write(calls, dtype, norms, size, rotated, interleaved, pool, rows):
    num_queries, block = 6, 16
    slots = torch.randperm(4 * block)[:rows]
    kv_dtype = {"int8": torch.int8, "bfloat16": torch.bfloat16}.get(pool, dtype)
    for num_kv in (2, 0):
        qkv = randn(rows, num_queries + 2 * num_kv, size, dtype=dtype)
        angles = torch.rand(rows, rotated) * 6 if rotated else None
        tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotated else None
        heads = QKVHeads(num_kv, interleaved, make_norms(norms, size, dtype))
        caches = [LayerCache.zeros(4, block, (2, size), kv_dtype, tiled=pool == "tiles") for _ in range(2)]
        exact = reference_attention.rotate_and_write(qkv.clone(), caches[0], slots, tables, heads)
        assert_near(OWN.rotate_and_write(qkv, caches[1], slots, tables, heads), exact, dtype)
        blocks = torch.arange(4)
        for expected, own in zip(*((cache.keys, cache.values) for cache in caches), strict=True):
            bound = torch.bfloat16 if pool in ("int8", "bfloat16") else dtype
            assert_near(own.load(blocks, torch.float32), expected.load(blocks, torch.float32), bound)
    is_written = rows and dtype == kv_dtype and dtype != torch.float32 and not caches[0].is_tiled
    assert calls.count("npu_scatter_pa_kv_cache") == bool(is_written)
    assert ("npu_rotary_mul" in calls) == bool(rows and 0 < rotated < 896)


def make_codes(bits: int, group: int, outputs: int, inputs: int, *, table="", has_zeros=False, has_minima=False):
    form = QuantLayout(bits, group, has_zeros=has_zeros, has_minima=has_minima, table=table)
    codes = Codes.empty(form, outputs, (0, inputs))
    codes.words.random_(-(1 << 31), (1 << 31) - 1)
    codes.scales.uniform_(0.01, 0.03)
    if codes.zeros is not None:
        codes.zeros.random_(0, 1 << bits)
    if codes.minima is not None:
        codes.minima.uniform_(-1, 0)
    return codes


@HALF
@pytest.mark.parametrize("rows", [1, 5, 0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["rounded", "codes", "groups"])
def test_int8_linear(calls, dtype, rows, has_bias, kind):
    outputs, inputs = 40, 96
    weight = quantized.quantize_int8(randn(outputs, inputs, dtype=dtype))
    if kind != "rounded":
        weight = quantized.pack_codes(make_codes(8, 32 if kind == "groups" else 0, outputs, inputs), dtype)
    x, bias = randn(rows, 2 * inputs, dtype=dtype)[:, ::2], randn(outputs, dtype=dtype) if has_bias else None
    result = products.int8_linear(ops, x, weight, bias)
    if rows:
        exact = torch.nn.functional.linear(
            x.float(), quantized.dequantize(weight), None if bias is None else bias.float()
        )
        assert_near(result, exact.to(dtype), torch.bfloat16)  # int8 activations
    assert result.shape == (rows, outputs)
    assert calls == ["npu_dynamic_quant", "npu_quant_matmul"] * bool(rows and kind != "groups")


@HALF
@pytest.mark.parametrize("rows", [1, 5, 0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("group", "inputs", "has_operator"),
    [(64, 256, True), (32, 96, True), (64, 96, True), (128, 64, True), (64, 72, False)],
)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_int4_linear(calls, dtype, rows, has_bias, group, inputs, has_operator, has_zeros):
    outputs = 40
    codes = make_codes(4, group, outputs, inputs, has_zeros=has_zeros)
    weight, exact_weight = products.pack_codes(codes.clone(), dtype), quantized.pack_codes(codes.clone(), dtype)
    x, bias = randn(rows, 2 * inputs, dtype=dtype)[:, ::2], randn(outputs, dtype=dtype) if has_bias else None
    result = products.int4_linear(ops, x, weight, bias)
    if rows:
        wide = quantized.dequantize(exact_weight)
        assert_near(
            result, torch.nn.functional.linear(x.float(), wide, None if bias is None else bias.float()).to(dtype), dtype
        )
    assert result.shape == (rows, outputs)
    assert calls == ["npu_weight_quant_batchmatmul"] * bool(rows and has_operator)
    ids = torch.tensor([0, 39, 45, -1, 7])
    assert_near(products.embedding(ids, weight, 3), quantized.embedding(ids, exact_weight, 3), dtype)


@pytest.mark.parametrize(
    "form",
    [{"table": "iq4"}, {"has_minima": True}, {"bits": 8}, {"group": 16}, {}],
    ids=["table", "minima", "8", "16", "lead"],
)
def test_forms_without_an_operator_are_dequantized(calls, form):
    bits, group = form.pop("bits", 4), form.pop("group", 32)
    codes = make_codes(bits, group, 24, 64, **form)
    if not form and (bits, group) == (4, 32):
        codes = replace(codes, columns=(8, 40))  # begins inside a group
    assert not products.multiplies(codes.form) or codes.lead
    weight = products.pack_codes(codes, torch.bfloat16)
    x = randn(3, codes.num_inputs, dtype=torch.bfloat16)
    exact = torch.nn.functional.linear(x.float(), quantized.dequantize(weight)).to(torch.bfloat16)
    assert_near(products.int4_linear(ops, x, weight), exact, torch.bfloat16)
    assert not calls


def test_more_outputs_than_a_call_takes_are_multiplied_in_parts(calls, monkeypatch):
    monkeypatch.setattr(products, "MAX_SIZE", 64)
    x, matrix = randn(3, 64, dtype=torch.bfloat16), randn(150, 64, dtype=torch.bfloat16)
    bias = randn(150, dtype=torch.bfloat16)
    for linear, weight in (
        (products.int8_linear, quantized.quantize_int8(matrix.clone())),
        (products.int4_linear, products.quantize_int4(matrix.clone(), 32)),
    ):
        whole = linear(ops, x, weight, bias)
        assert whole.shape == (3, 150)
        for begin in (0, 64, 128):
            assert torch.equal(whole[:, begin : begin + 64], linear(ops, x, weight, bias)[:, begin : begin + 64])
    assert calls.count("npu_quant_matmul") == 4 * 3 and calls.count("npu_weight_quant_batchmatmul") == 4 * 3


def exact_linear(x, weight):
    """Without the inputs' rounding to 8 bits."""
    return torch.nn.functional.linear(x.float(), quantized.dequantize(weight)).to(x.dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["dense", "int8", "int4/32", "int4/96", "int4/64"])
@DTYPES
@pytest.mark.parametrize("rows", [1, 9, 150, 0])
@pytest.mark.parametrize(("num_experts", "first"), [(8, 0), (3, 2), (1, 4)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_experts(calls, kind, dtype, rows, num_experts, first, activation):
    size, columns, each = 96, 192, 3
    name, _, group = kind.partition("/")
    packers = {
        "dense": (dense.pack_weight, dense.linear),
        "int8": (quantized.quantize_int8, exact_linear),
        "int4": (lambda matrix: products.quantize_int4(matrix, int(group)), partial(products.int4_linear, ops)),
    }
    held = StackedExperts(
        *packers[name], None, ExpertShape(num_experts, size, (0, columns), dtype), torch.device("cpu")
    )
    exact_held = held
    if name == "int4":
        pack = partial(quantized.quantize_int4, group=int(group))
        exact_held = reference_experts.ReferenceExperts(
            pack, exact_linear, None, ExpertShape(num_experts, size, (0, columns), dtype), torch.device("cpu")
        )
    for index in range(num_experts):
        pair = randn(2 * columns, size, dtype=dtype), randn(size, columns, dtype=dtype)
        for each_held in {id(held): held, id(exact_held): exact_held}.values():
            each_held.pack(index, *(matrix.clone() for matrix in pair))
    x = randn(rows, size, dtype=dtype)
    ids = (
        torch.stack([torch.randperm(8)[:each] for _ in range(rows)])
        if rows
        else torch.empty(0, each, dtype=torch.int64)
    )
    weights, mlps = torch.rand(rows, each), ExpertMLPs(held, first, gelu=activation == "gelu")
    exact = reference_experts.experts(x, ids, weights, replace(mlps, packed=exact_held))
    calls.clear()
    for mine in (mlps, replace(mlps, packed=held.clone())):
        assert_near(experts.experts(ops, x, ids, weights, mine), exact, dtype)
    in_16_bits = dtype != torch.float32 and kind != "int4/64"  # 96 inputs are one and a half groups of 64
    is_grouped = rows and num_experts > 1 and (kind == "dense" or in_16_bits)
    assert calls.count("npu_grouped_matmul") == (4 if is_grouped else 0)


RULES = [
    RoutingRule(num_chosen=3),
    RoutingRule(num_chosen=3, normalized=False, scale=2.5),
    RoutingRule(num_chosen=3, scale=2.5),
    RoutingRule(num_chosen=4, scores="sigmoid", scale=2.5, num_groups=4, num_chosen_groups=2),
    RoutingRule(num_chosen=2, num_groups=4, num_chosen_groups=2, num_group_best=1),
    RoutingRule(num_chosen=2, num_groups=4, num_chosen_groups=4),
    RoutingRule(num_chosen=2, scores="sigmoid", normalized=False),
    RoutingRule(num_chosen=2, scores="chosen"),
    RoutingRule(num_chosen=2, num_groups=4, num_chosen_groups=2, num_group_best=3),
    RoutingRule(num_chosen=2, num_groups=8, num_chosen_groups=2, num_group_best=1),
]


@pytest.mark.parametrize(("index", "rows"), [*((index, 5) for index in range(len(RULES))), (0, 0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_route(calls, index, rows, has_bias):
    rule = RULES[index]
    bias, factors = (torch.rand(16), torch.rand(16) + 1) if has_bias else (None, None)
    router = RouterWeights(torch.randn(16, 24), rule, bias, factors)
    x, counts = randn(rows, 24, dtype=torch.bfloat16), torch.zeros(2, 16, dtype=torch.int64)
    ids, weights = route.route(ops, x, router, counts[0])
    exact_ids, exact_weights = reference_route.route(x, router, counts[1])
    assert torch.equal(ids.sort(1).values, exact_ids.sort(1).values) and ids.dtype == torch.int64
    assert torch.equal(*counts)
    order, exact_order = ids.argsort(1), exact_ids.argsort(1)
    assert_near(weights.gather(1, order), exact_weights.gather(1, exact_order), torch.float32)
    assert calls == ["npu_moe_gating_top_k"] * bool(rows and index < 6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.npu_swiglu(torch.ones(4, 8).t()),
        lambda: ops.npu_swiglu(torch.ones(0, 8)),
        lambda: ops.npu_add_rms_norm(*(torch.ones(2, 4, dtype=torch.bfloat16),) * 2, torch.ones(4)),
        lambda: ops.npu_rotary_mul(*(torch.ones(2, 1, 896),) * 3),
        lambda: ops.npu_dynamic_quant(torch.ones(2, 4)),
        lambda: ops.npu_quant_matmul(
            torch.ones(1, 8, dtype=torch.int8),
            torch.ones(8, 65536, dtype=torch.int8),
            torch.ones(65536),
            pertoken_scale=torch.ones(1),
            output_dtype=torch.bfloat16,
        ),
        lambda: ops.npu_scatter_pa_kv_cache(
            *(torch.ones(2, 1, 16),) * 2,
            *(torch.zeros(1, 16, 1, 16) for _ in range(2)),
            torch.arange(2),
            cache_mode="Norm",
        ),
        lambda: ops.npu_moe_gating_top_k(torch.ones(1, 4096), 2),
    ],
)
def test_stand_in_refuses_what_pages_do_not_allow(call):
    with pytest.raises(LimitError, match=r"\.md\)"):
        call()
