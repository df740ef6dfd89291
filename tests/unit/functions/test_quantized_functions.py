"""Weights in 8 and 4 bits: how near they are, and the compiled functions against the reference."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.cpu.quantized import CpuQuantized
from labinfer.functions.packed_weight import QuantizedWeight
from labinfer.functions.reference import quantized
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.launch.providers import make_registry, reference_registry
from labinfer.native import compiler
from labinfer.weights.codes import Codes, QuantLayout

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = [(32, 16), (64, 128), (31, 6), (70, 130), (33, 257), (1, 1), (100, 7)]
TOKENS = (1, 2, 12, 13, 14, 40)
compiled = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)


@pytest.fixture(scope="module", params=["", "amx"])
def cpu(compiled_functions, request) -> CpuQuantized:
    if request.param not in compiled_functions.kernels:
        pytest.skip("this processor has no AMX")
    return CpuQuantized(compiled_functions, request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# What the reference means.


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_int8_is_within_half_a_step(outputs, inputs):
    weight = torch.randn(outputs, inputs)
    off = (quantized.dequantize(quantized.quantize_int8(weight)) - weight).abs()
    assert (off <= weight.abs().amax(1, keepdim=True) / 254 * 1.0001).all()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_int4_is_better_than_the_scale_that_just_holds_the_largest(outputs, inputs, group):
    weight = torch.randn(outputs, inputs)
    got = quantized.dequantize(quantized.quantize_int4(weight, group))
    padded = torch.nn.functional.pad(weight, (0, -inputs % group)).view(outputs, -1, group)
    extreme = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    global_scale = quantized.choose_global_scale(weight)
    scale = (extreme / -8 / global_scale).half().float() * global_scale
    plain = scale * (padded / torch.where(scale == 0, 1, scale)).round().clamp(-8, 7)
    plain = plain.view(outputs, -1)[:, :inputs]
    assert (got - weight).norm() <= (plain - weight).norm()
    assert (got - weight).norm() < 0.13 * weight.norm()  # 4 bits of normal numbers


@pytest.mark.parametrize("factor", [1e-30, 3e-9, 1.0, 4096.0, 1e15])
def test_int4_is_as_near_for_weights_of_any_size(factor):
    """Scales are float16 times a power of two of the matrix, so it does not matter how large its weights are."""
    weight = torch.randn(40, 64)
    off = quantized.dequantize(quantized.quantize_int4(weight * factor, 32)).double() / factor - weight
    assert off.norm() < 0.13 * weight.norm()
    packed = quantized.quantize_int4(weight * factor, 32)
    assert packed.scales.dtype == torch.float16 and 2**13 <= packed.scales.abs().max() < 2**15


def test_int4_keeps_groups_that_are_much_smaller_than_others():
    """Scales of 2**-28 of the largest keep all their bits."""
    weight = torch.randn(2, 64)
    weight[1] *= 2.0**-28
    got = quantized.dequantize(quantized.quantize_int4(weight, 32))
    assert ((got - weight).norm(dim=1) < 0.15 * weight.norm(dim=1)).all()


def test_rows_of_zeros_and_whole_numbers_are_exact():
    weight = torch.cat([torch.zeros(1, 64), torch.arange(-127.0, 1, 2).view(1, 64)])
    assert torch.equal(quantized.dequantize(quantized.quantize_int8(weight)), weight)
    weight = torch.cat([torch.zeros(1, 64), torch.arange(-8.0, 8, 0.25).floor().view(1, 64)])
    assert torch.equal(quantized.dequantize(quantized.quantize_int4(weight, 64)), weight)
    x = torch.zeros(2, 64)
    assert torch.equal(quantized.linear(x, quantized.quantize_int8(weight)), torch.zeros(2, 2))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_vocabulary_is_looked_up_in_whole_numbers(quantization):
    functions = reference_registry(32).select(CPU, torch.float32, quantization=quantization)
    weight = torch.randn(40, 64)
    layer, table = functions.matrices["layer"].pack_weight(weight), functions.matrices["vocabulary"].pack_weight(weight)
    assert layer.nbytes == {"int8": 40 * 64 + 40 * 4, "int4": 40 * 64 // 2 + 80 * 2}[quantization]
    assert table.nbytes == {"int8": 40 * 64 + 40 * 4, "int4": 40 * 64 // 2 + 80 * 2}[quantization]
    rows = functions.matrices["vocabulary"].embedding(torch.tensor([10, 9, 49, 50]), table, 10)
    wanted = quantized.dequantize(table)
    assert torch.equal(rows, torch.stack([wanted[0], torch.zeros(64), wanted[39], torch.zeros(64)]))


def packed_bytes(functions, kind: str) -> int:
    return functions.matrices[kind].pack_weight(torch.randn(40, 64, dtype=torch.bfloat16)).nbytes


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_kind_of_a_matrix_decides_about_its_quantization(quantization):
    functions = reference_registry(64).select(CPU, torch.bfloat16, quantization=quantization)
    layers = {"none": 40 * 64 * 2, "int8": 40 * 64 + 40 * 4, "int4": 40 * 64 // 2 + 40 * 2}[quantization]
    vocabulary = layers if quantization != "int4" else 40 * 64 // 2 + 80 * 2  # groups of 32
    expected = {"layer": layers, "expert": layers, "vocabulary": vocabulary, "exact": 40 * 64 * 2}
    assert {kind: packed_bytes(functions, kind) for kind in functions.matrices} == expected
    assert functions.matrices["exact"].quantization == "none"
    assert functions.matrices["expert"].quantization == quantization


def test_exact_matrices_take_the_implementation_that_is_named_where_it_knows_them():
    registry = reference_registry(32)
    calls = {"pack_weight": lambda weight: weight, "linear": lambda *_: "named", "embedding": lambda *_: "row"}
    registry.add_all(calls, name="named", quantization="int8", layout="panels")
    registry.add_all(calls, name="both", quantization="int8", layout="panels")
    registry.add_all(calls, name="both", layout="panels")
    matrix = torch.randn(4, 64)
    for name, exact in {"named": "both", "both": "both", "reference": "reference"}.items():
        overrides = dict.fromkeys(("pack_weight", "linear"), name)
        functions = registry.select(CPU, torch.float32, overrides, quantization="int8").matrices["exact"]
        assert functions.quantization == "none"
        assert (functions.linear is calls["linear"]) == (exact == "both"), name
        assert (functions.pack_weight(matrix) is matrix) == (exact == "both"), name


# The compiled ones.


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same whole numbers, summed exactly: all that differs is how the last float32 operations round."""
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[got.dtype]
    torch.testing.assert_close(got, wanted, rtol=step, atol=step * float(wanted.abs().float().mean()))


def linear_of(dtype: torch.dtype, tokens: int, outputs: int, inputs: int, biased: bool):
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    return x, weight, torch.randn(outputs).to(dtype) if biased else None


@pytest.mark.pairwise("cpu")
@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_linear_int8(cpu, dtype, tokens, outputs, inputs):
    for biased in (False, True):
        x, weight, bias = linear_of(dtype, tokens, outputs, inputs, biased)
        x[tokens // 2] = 0
        wanted = quantized.linear(x, quantized.quantize_int8(weight), bias)
        packed = cpu.quantize_int8(weight)
        assert_near(cpu.linear(x, packed, bias), wanted)
        assert_near(cpu.linear(x.repeat(1, 2)[:, :inputs], packed, bias), wanted)  # rows that are apart


@pytest.mark.pairwise("cpu")
@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_linear_int4(cpu, dtype, group, tokens, outputs, inputs):
    for biased in (False, True):
        x, weight, bias = linear_of(dtype, tokens, outputs, inputs, biased)
        weight[outputs // 2] = 0
        wanted = quantized.linear(x, quantized.quantize_int4(weight, group), bias)
        assert_near(cpu.linear(x, cpu.quantize_int4(weight, group), bias), wanted)


def coded_matrices(cpu: CpuQuantized, dtype: torch.dtype) -> dict[tuple[int, str, str], QuantizedWeight]:
    """Random matrices (70, 192) in groups of 32, by the bits of a code, the kind of offsets, and what codes stand for."""
    forms = {(bits, kind, ""): None for bits in (4, 5, 8) for kind in ("none", "zeros", "minima")}
    del forms[5, "zeros", ""]  # no file has these
    matrices = {}
    for bits, kind, table in (*forms, (4, "none", "e2m1"), (4, "none", "nvfp4"), (4, "none", "iq4")):
        scales = 2.0 ** torch.randint(-6, 0, (70, 6)) if table == "e2m1" else torch.rand(70, 6)
        offsets = {
            "zeros": torch.randint(2**bits, (70, 6), dtype=torch.uint8) if kind == "zeros" else None,
            "minima": torch.randn(70, 6) if kind == "minima" else None,
        }
        words = torch.randint(-(2**31), 2**31, (70, 192 * bits // 32), dtype=torch.int32)
        codes = Codes(form=QuantLayout(bits, 32, table=table), columns=(0, 192), words=words, scales=scales, **offsets)
        matrices[bits, kind, table] = cpu.pack_codes(codes, dtype)
    return matrices


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 33, 300])
def test_tiles_come_to_the_same_bits(compiled_functions, dtype, tokens):
    """Sums are exact, so it does not matter which kernel is faster for so many rows."""
    if "amx" not in compiled_functions.kernels:
        pytest.skip("this processor has no AMX")
    x, weight, bias = linear_of(dtype, tokens, 70, 192, True)
    plain, tiles = CpuQuantized(compiled_functions), CpuQuantized(compiled_functions, "amx")
    matrices = [plain.quantize_int8(weight), plain.quantize_int4(weight, 32), plain.quantize_int4(weight, 64)]
    for packed in (*matrices, *coded_matrices(plain, dtype).values()):
        assert torch.equal(tiles.linear(x, packed, bias), plain.linear(x, packed, bias))


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_same_bits_in_passes_of_any_size(compiled_functions, dtype):
    """Some hold their sums in registers, others in memory."""
    functions = CpuQuantized(compiled_functions)
    x, weight, bias = linear_of(dtype, 40, 70, 192, True)
    for packed in (functions.quantize_int4(weight, 64), *coded_matrices(functions, dtype).values()):
        alone = torch.cat([functions.linear(row[None], packed, bias) for row in x])
        for rows in (6, 7, 12, 13, 40):
            assert torch.equal(functions.linear(x[:rows], packed, bias), alone[:rows])


@pytest.fixture
def in_bytes(compiled_functions) -> CpuQuantized:
    if compiled_functions.bytes_kernel is None:
        pytest.skip("this processor multiplies codes as they are")
    return CpuQuantized(compiled_functions, compiled_functions.bytes_kernel, in_bytes=True)


def assert_within_half_a_byte(got_IO: torch.Tensor, exact_IO: torch.Tensor, margin: float) -> None:
    """Weights that were rounded to a 127th of the largest that an output's can be, then to bfloat16.

    Args:
        margin: the largest weight that an output's scales allow, by the largest that it has.
    """
    half = exact_IO.abs().amax(0) * margin / 127 * 0.51
    assert ((got_IO - exact_IO).abs() <= half + exact_IO.abs() * 2**-7).all()
    assert got_IO.numel() < 1000 or (got_IO != exact_IO).any()  # few may be whole bytes by chance


@compiled
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_in_bytes_is_within_half_a_byte(in_bytes, outputs, inputs, group):
    """What a product of unit vectors gives are the weights."""
    packed = in_bytes.quantize_int4(torch.randn(outputs, inputs).bfloat16(), group)
    exact = in_bytes.embedding(torch.arange(outputs), packed, 0).float().T
    assert_within_half_a_byte(in_bytes.linear(torch.eye(inputs).bfloat16(), packed).float(), exact, 8 / 7)


@compiled
def test_codes_in_bytes_are_within_half_a_byte_or_exact(compiled_functions, in_bytes):
    ones, exact = torch.eye(192).bfloat16(), CpuQuantized(compiled_functions, in_bytes.kernel)
    for (bits, kind, table), packed in coded_matrices(in_bytes, torch.bfloat16).items():
        got, wanted = in_bytes.linear(ones, packed), exact.linear(ones, packed)
        if bits == 8 or kind == "minima":
            assert torch.equal(got, wanted), (bits, kind)
        else:
            assert_within_half_a_byte(got.float(), wanted.float(), 1.2)
        wide = torch.randn(40, 192)
        assert torch.equal(in_bytes.linear(wide, packed), exact.linear(wide, packed)), (bits, kind, table)


@compiled
def test_codes_in_bytes_may_begin_within_a_group(in_bytes):
    """The 30 inputs before the first are not of this rank."""
    words, scales = torch.randint(-(2**31), 2**31, (70, 24), dtype=torch.int32), torch.rand(70, 6)
    codes = Codes(form=QuantLayout(4, 32), columns=(0, 192), words=words, scales=scales, zeros=None)
    whole, part = (in_bytes.pack_codes(each, torch.bfloat16) for each in (codes, replace(codes, columns=(30, 192))))
    x = torch.randn(50, 162).bfloat16()
    assert torch.equal(in_bytes.linear(x, part), in_bytes.linear(torch.nn.functional.pad(x, (30, 0)), whole))


@compiled
@pytest.mark.parametrize("inputs", [64, 200, 4864])
def test_rows_in_bytes_do_not_depend_on_others(in_bytes, inputs):
    """Rows of one pass and of several, in whole tiles and what is left; scales of either sign, and none."""
    weight = torch.randn(70, inputs).bfloat16()
    weight[3] = 0
    packed, bias = in_bytes.quantize_int4(weight, 64), torch.randn(70).bfloat16()
    x = torch.randn(1100, inputs).bfloat16()
    x[7] = 0
    whole = in_bytes.linear(x, packed, bias)
    exact = in_bytes.linear(x.float(), packed, bias.float())  # in float32 weights keep their groups
    assert 0.003 * exact.norm() < (whole.float() - exact).norm() < 0.015 * exact.norm()
    for first, end in ((0, 1), (5, 12), (0, 16), (3, 36), (100, 700)):
        assert torch.equal(in_bytes.linear(x[first:end], packed, bias), whole[first:end]), (first, end)


@compiled
def test_what_is_written_past_the_caches_is_there(compiled_functions, cpu):
    """4.3 MB of outputs, by several threads."""
    x, weight, bias = linear_of(torch.bfloat16, 300, 7200, 64, True)
    packed = cpu.quantize_int8(weight)
    with threads_of_torch(3):
        assert torch.equal(cpu.linear(x, packed, bias), CpuQuantized(compiled_functions).linear(x, packed, bias))


def unpack(packed: QuantizedWeight) -> QuantizedWeight:
    """The compiled functions' int4 in the reference's order: panels of 32 outputs, in each group scales, then numbers."""
    group, panels = packed.group, -(-packed.outputs // 32)
    groups = packed.data.view(panels, -1, 64 + 16 * group)
    scales = groups[:, :, :64].contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)
    halves = groups[:, :, 64:].reshape(panels, -1, group // 8, 32, 4).permute(0, 3, 1, 2, 4).flatten(0, 1)
    whole = torch.stack([halves & 15, halves >> 4], dim=-2).reshape(len(scales), -1)
    data = whole[:, 0::2] | whole[:, 1::2] << 4
    return replace(packed, data=data[: packed.outputs], scales=scales[: packed.outputs])


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_int4_packs_the_same_bits_as_the_reference(cpu, dtype, group, factor):
    weight = (torch.randn(70, 130) * factor).to(dtype)
    weight[3] *= 2.0**-20
    weight[5] = 0
    got, wanted = unpack(cpu.quantize_int4(weight, group)), quantized.quantize_int4(weight, group)
    assert got.global_scale == wanted.global_scale
    assert torch.equal(got.scales, wanted.scales)
    assert torch.equal(got.data, wanted.data)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_embedding_int8(cpu, dtype, outputs, inputs):
    table = torch.randn(outputs, inputs).to(dtype)
    ids = torch.tensor([10, 9, 10 + outputs - 1, 10 + outputs, 10])
    wanted = quantized.embedding(ids, quantized.quantize_int8(table), 10)
    got = cpu.embedding(ids, cpu.quantize_int8(table), 10)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int4_is_compiled_for_layers_and_vocabulary(compiled_functions, dtype):
    functions = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)]).select(
        CPU, dtype, quantization="int4"
    )
    packing = {kind: functions.matrices[kind].packing for kind in ("layer", "vocabulary")}
    assert packing == {"layer": "cpu panels int4", "vocabulary": "cpu panels int4/32"}


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_embedding_int4(cpu, dtype, outputs, inputs, factor):
    table = (torch.randn(outputs, inputs) * factor).to(dtype)
    ids = torch.tensor([10, 9, 10 + outputs - 1, 10 + outputs, 10])
    wanted = quantized.embedding(ids, quantized.quantize_int4(table, 32), 10)
    got = cpu.embedding(ids, cpu.quantize_int4(table, 32), 10)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)


@compiled
@pytest.mark.parametrize("inputs", [4864, 30_000])
def test_long_sums_do_not_overflow(cpu, inputs):
    """All inputs and weights at their largest, whose products are positive or negative all alike."""
    x, weight = torch.ones(3, inputs), torch.ones(32, inputs)
    weight[1::2] = -1
    wanted = torch.tensor([inputs, -inputs] * 16).float().expand(3, 32)
    torch.testing.assert_close(cpu.linear(x, cpu.quantize_int8(weight)), wanted, rtol=1e-5, atol=0)
    int4 = cpu.linear(x, cpu.quantize_int4(weight, 64))
    torch.testing.assert_close(int4, wanted, rtol=1e-5, atol=0)


@compiled
def test_numbers_that_are_none_do_no_harm(cpu):
    """They spoil their own row only."""
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    packed = cpu.quantize_int8(weight)
    good = cpu.linear(x, packed)
    for bad in (float("nan"), float("inf")):
        x[1, 5] = bad
        got = cpu.linear(x, packed)
        assert torch.equal(got[[0, 2]], good[[0, 2]])
        assert not got[1].isfinite().any()
