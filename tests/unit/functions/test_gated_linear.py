"""Products with the activation of a gated MLP in one call: the bits of both calls after each other."""

from __future__ import annotations

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.base.errors import UserError
from labinfer.functions.cpu.dense import PANEL
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.library import Library
from labinfer.functions.cpu.packed12 import CpuPacked12
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.cpu.quantized import CpuQuantized
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.launch.providers import make_registry, parse_overrides, reference_registry

CPU = torch.device("cpu")

THREADS = 2
COLUMNS = (9 * PANEL, 48)
"""Of the MLP; the last ones are no whole panels, and are activated apart."""
ROWS = (0, 1, 7, 33, 70, 600)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 8).to(dtype)


def check(
    functions, packed, floats: CpuFunctions, columns: int, inputs: int, dtype: torch.dtype, all_rows=ROWS
) -> None:
    bias_O = normal(2 * columns, dtype=dtype)
    for rows in all_rows:
        x_TI = normal(rows, inputs, dtype=dtype) * 40
        for gelu in (False, True):
            for bias in (None, bias_O):
                gate_up_TF = functions.linear(x_TI, packed, bias)
                expected = floats.gelu_and_mul(gate_up_TF) if gelu else floats.silu_and_mul(gate_up_TF)
                with threads_of_torch(THREADS):
                    got = functions.gated_linear(x_TI, packed, bias, gelu=gelu)
                assert got.dtype == dtype
                assert torch.equal(got, expected), (rows, gelu)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("form", ["plain", "packed12"])
def test_bfloat16(compiled_functions: Library, kernel: str, form: str, columns: int):
    make = CpuPacked12 if form == "packed12" else CpuFunctions
    functions, floats = make(compiled_functions, kernel), CpuFunctions(compiled_functions)
    check(functions, functions.pack_weight(normal(2 * columns, 130)), floats, columns, 130, torch.bfloat16)


def test_odd_inputs(compiled_functions: Library, kernel: str):
    functions = CpuFunctions(compiled_functions, kernel)
    check(functions, functions.pack_weight(normal(128, 7)), functions, 64, 7, torch.bfloat16)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", CpuQuantized.dtypes, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_whole_numbers(compiled_functions: Library, kernel: str, bits: int, dtype: torch.dtype, columns: int):
    if kernel == "dot":
        pytest.skip("whole numbers have no such kernel")
    functions, floats = CpuQuantized(compiled_functions, kernel), CpuFunctions(compiled_functions, dtype=dtype)
    weight_OI = normal(2 * columns, 192, dtype=dtype)
    packed = functions.quantize_int8(weight_OI) if bits == 8 else functions.quantize_int4(weight_OI, 64)
    check(functions, packed, floats, columns, 192, dtype)


@pytest.mark.parametrize("form", ["plain", "packed12", "int8", "int4", "bytes"])
def test_more_than_is_near(compiled_functions: Library, kernel: str, form: str):
    """Panels in several parts, and rows in several blocks."""
    columns, inputs, dtype = 8 * PANEL, 4100, torch.bfloat16
    weight_OI, floats = normal(2 * columns, inputs), CpuFunctions(compiled_functions)
    if form in ("int8", "int4", "bytes"):
        if kernel == "dot" or (form == "bytes" and kernel != compiled_functions.bytes_kernel):
            pytest.skip("whole numbers have no such kernel")
        functions = CpuQuantized(compiled_functions, kernel, in_bytes=form == "bytes")
        packed = functions.quantize_int8(weight_OI) if form == "int8" else functions.quantize_int4(weight_OI, 64)
    else:
        functions = (CpuPacked12 if form == "packed12" else CpuFunctions)(compiled_functions, kernel)
        packed = functions.pack_weight(weight_OI)
    check(functions, packed, floats, columns, inputs, dtype, (45, 700))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dense_weights_of_other_dtypes(compiled_functions: Library, dtype: torch.dtype):
    functions = CpuFunctions(compiled_functions, dtype=dtype)
    check(functions, functions.pack_weight(normal(18 * PANEL, 40, dtype=dtype)), functions, 9 * PANEL, 40, dtype)
    assert "gated_linear" not in functions.calls()


def test_more_is_written_than_stays_in_the_caches(compiled_functions: Library, kernel: str):
    functions = CpuFunctions(compiled_functions, kernel)
    packed, x_TI = functions.pack_weight(normal(7168, 66)), normal(640, 66) * 40
    assert torch.equal(functions.gated_linear(x_TI, packed), functions.silu_and_mul(functions.linear(x_TI, packed)))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_implementation_is_that_of_linear(compiled_functions: Library, kernel: str, quantization: str):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    name = f"cpu-{kernel}" if kernel else "cpu"
    if quantization != "none" and kernel == "dot":
        pytest.skip("whole numbers have no such kernel")
    for names, choice in (({"linear": name}, {}), ({}, {"layer.linear": [name]})):
        chosen = registry.select(CPU, torch.bfloat16, names, quantization, choice).matrices["layer"]
        fused, alone = chosen.gated_linear.__self__, chosen.linear.__self__
        assert fused.kernel == alone.kernel == kernel and type(fused) is type(alone)


def test_codes_become_bytes_only_where_that_is_measured_or_named(compiled_functions: Library):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    kernel = compiled_functions.bytes_kernel
    name = f"cpu-{kernel}-bytes" if kernel else "cpu-bytes"

    def is_in_bytes(dtype: torch.dtype, names: dict, choice: dict) -> bool:
        return registry.select(CPU, dtype, names, "int4", choice).matrices["layer"].linear.__self__.in_bytes

    assert not any(is_in_bytes(dtype, {}, {}) for dtype in CpuQuantized.dtypes)
    if kernel is None:
        pytest.skip("this processor multiplies codes as they are")
    assert is_in_bytes(torch.bfloat16, {"linear": name}, {})
    assert is_in_bytes(torch.bfloat16, {}, {"layer.linear": [name]})
    assert not is_in_bytes(torch.float32, {}, {"layer.linear": [name]})


@pytest.mark.parametrize(
    ("given", "is_fused"),
    [
        (("cpu",), True),
        (("silu_and_mul=reference",), False),
        (("gelu_and_mul=cpu",), False),
        (("gated_linear=cpu", "silu_and_mul=reference"), True),
        (("gated_linear=reference",), False),
        (("linear=reference",), False),
        (("reference",), False),
    ],
)
def test_activation_that_is_named_is_used(compiled_functions: Library, given: tuple[str, ...], is_fused: bool):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    functions = registry.select(CPU, torch.bfloat16, parse_overrides(given))
    matrices = [
        functions.matrices["layer"],
        functions.matrices["exact"],
        functions.codes["int8"],
        functions.codes["int4"],
    ]
    if given != ("linear=reference",):  # that of codes is chosen apart
        assert [chosen.gated_linear is not None for chosen in matrices] == [is_fused] * 4
    assert (matrices[0].gated_linear is not None) == is_fused


def test_name_that_nothing_has_is_refused(compiled_functions: Library):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    with pytest.raises(UserError, match="--functions gated_linear=fast: no such implementation for cpu in bfloat16"):
        registry.select(CPU, torch.bfloat16, {"gated_linear": "fast"})
    with pytest.raises(UserError, match="linear=cpu-dot,gated_linear=cpu: both are used for the same layers"):
        registry.select(CPU, torch.bfloat16, {"linear": "cpu-dot", "gated_linear": "cpu"})
    both = registry.select(CPU, torch.bfloat16, {"linear": "cpu", "gated_linear": "reference"}).matrices["layer"]
    assert both.gated_linear is None and both.linear.__self__.kernel == ""


def test_where_there_is_none_layers_call_both(compiled_functions: Library):
    both = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    for registry, dtype in ((reference_registry(), torch.bfloat16), (both, torch.float32)):
        assert registry.select(CPU, dtype).matrices["layer"].gated_linear is None
