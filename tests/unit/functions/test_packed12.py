"""bfloat16 in 12 bits: the same bits come out, weights and products."""

from __future__ import annotations

import pytest
import torch

from labinfer.base.errors import UserError
from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.library import Library
from labinfer.functions.cpu.packed12 import CpuPacked12, CpuPacked12Weight
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.packed_weight import DenseWeight
from labinfer.functions.reference import packed12 as reference
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.launch.providers import make_registry, reference_registry

CPU = torch.device("cpu")


def all_patterns() -> torch.Tensor:
    """Every number that bfloat16 has, NaN, infinities, zeros and denormals included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16)


def rows_of(functions: CpuPacked12, weight_OI: torch.Tensor, table: object) -> torch.Tensor:
    return functions.embedding(torch.arange(len(weight_OI)), table, 0)


def test_every_pattern_comes_out_of_the_reference_as_it_went_in():
    weight_OI = all_patterns().view(256, 256)
    assert torch.equal(bits(reference.unpack_weight(reference.pack_weight(weight_OI.clone()))), bits(weight_OI))


def test_every_pattern_comes_out_of_the_compiled_form_as_it_went_in(compiled_functions: Library):
    functions = CpuPacked12(compiled_functions)
    patterns = all_patterns()
    seen = []
    for part in patterns.split(64):  # few enough among normal numbers to be patched
        weight_OI = normal(64, 256)
        weight_OI.view(-1)[torch.randperm(weight_OI.numel())[:64]] = part
        packed = functions.pack_weight(weight_OI.clone())
        assert isinstance(packed, CpuPacked12Weight)
        rows_OI = rows_of(functions, weight_OI, packed)
        assert torch.equal(bits(rows_OI), bits(weight_OI))
        seen.append(bits(rows_OI)[torch.isin(bits(rows_OI), bits(part))])
    assert len(torch.cat(seen).unique()) == len(patterns)


@pytest.mark.parametrize("outputs, inputs", [(32, 2), (33, 18), (64, 16), (96, 62), (100, 896)])
def test_products_have_the_bits_of_the_plain_form(compiled_functions: Library, outputs: int, inputs: int, kernel: str):
    plain, packed12 = CpuFunctions(compiled_functions, kernel), CpuPacked12(compiled_functions, kernel)
    weight_OI = normal(outputs, inputs, seed=inputs)
    weight_OI[3, 1], weight_OI[outputs - 1, 0], weight_OI[5, inputs - 1] = 3.0, 0.0, -1e-9
    other = packed12.pack_weight(weight_OI.clone())
    table = plain.pack_weight(weight_OI.clone())
    bias_O = normal(outputs, seed=1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 14, 27, 40, 300):
        x_TI = normal(rows, inputs, seed=rows) * 50
        for bias in (None, bias_O):
            expected = bits(plain.linear(x_TI, table, bias))
            assert torch.equal(bits(packed12.linear(x_TI, other, bias)), expected), rows
    ids_T = torch.tensor([0, outputs, outputs - 1, 5, 3, -1])
    assert torch.equal(packed12.embedding(ids_T, other, 0), plain.embedding(ids_T, table, 0))
    assert torch.equal(packed12.embedding(ids_T + 7, other, 7), plain.embedding(ids_T, table, 0))


@pytest.mark.parametrize("inputs", [896, 4100])
def test_panels_that_are_read_once_or_again_have_the_bits_of_the_plain_form(
    compiled_functions: Library, inputs: int, kernel: str
):
    """Rows in whole tiles, with some left, and in several passes and blocks; patches all along a panel."""
    plain, packed12 = CpuFunctions(compiled_functions, kernel), CpuPacked12(compiled_functions, kernel)
    weight_OI = normal(64, inputs, seed=inputs)
    weight_OI[::7, ::90] = 3.0
    other, table = packed12.pack_weight(weight_OI.clone()), plain.pack_weight(weight_OI.clone())
    assert isinstance(other, CpuPacked12Weight)
    for rows in (32, 64, 96, 512, 544, 1100):
        x_TI = normal(rows, inputs, seed=rows) * 50
        assert torch.equal(bits(packed12.linear(x_TI, other)), bits(plain.linear(x_TI, table))), rows


def test_a_packed_matrix_takes_three_quarters(compiled_functions: Library):
    weight_OI = normal(1024, 896)
    packed = CpuPacked12(compiled_functions).pack_weight(weight_OI.clone())
    assert 0.75 < packed.nbytes / weight_OI.nbytes < 0.76
    assert abs(reference.pack_weight(weight_OI).nbytes / packed.nbytes - 1) < 0.01
    with torch.device("meta"):
        assert reference.pack_weight(torch.empty(1024, 896, dtype=torch.bfloat16)).nbytes == 0.75 * weight_OI.nbytes


def test_a_matrix_with_too_many_patches_stays_in_16_bits(compiled_functions: Library):
    functions = CpuPacked12(compiled_functions)
    weight_OI = normal(64, 128)
    zeroed_OI = weight_OI.clone()
    zeroed_OI[:, ::20] = 0
    packed = functions.pack_weight(zeroed_OI.clone())
    assert isinstance(packed, DenseWeight)
    assert isinstance(functions.pack_weight(weight_OI.clone()), CpuPacked12Weight)
    assert torch.equal(rows_of(functions, zeroed_OI, packed), zeroed_OI)
    x_TI = normal(3, 128, seed=3)
    plain = CpuFunctions(compiled_functions)
    assert torch.equal(functions.linear(x_TI, packed), plain.linear(x_TI, plain.pack_weight(zeroed_OI.clone())))


def test_panels_of_zeros_are_packed(compiled_functions: Library):
    """As vocabularies are filled up; each panel has a base of its own."""
    weight_OI = normal(128, 64)
    weight_OI[64:] = 0
    functions = CpuPacked12(compiled_functions)
    packed = functions.pack_weight(weight_OI.clone())
    assert isinstance(packed, CpuPacked12Weight)
    assert torch.equal(rows_of(functions, weight_OI, packed), weight_OI)


def test_the_reference_multiplies_with_the_same_weights():
    weight_OI, x_TI, bias_O = normal(33, 17), normal(5, 17, seed=1), normal(33, seed=2)
    packed = reference.pack_weight(weight_OI.clone())
    assert torch.equal(reference.linear(x_TI, packed, bias_O), torch.nn.functional.linear(x_TI, weight_OI, bias_O))
    assert torch.equal(reference.embedding(torch.tensor([2, 40]), packed, 1)[0], weight_OI[1])


def test_the_form_of_weights_limits_the_candidates(compiled_functions: Library):
    names = {}
    for form in ("auto", "plain", "packed12"):
        registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)], weights=form)
        names[form] = set(registry.candidates("linear", CPU, torch.bfloat16))
        assert registry.candidates("linear", CPU, torch.bfloat16, quantization="int8")
        assert set(registry.candidates("embedding", CPU, torch.bfloat16)) & names[form]
    assert "cpu-packed12" in names["packed12"] and "cpu" in names["plain"]
    assert not names["packed12"] & names["plain"]
    assert names["auto"] == names["packed12"] | names["plain"]


def test_12_bits_are_for_bfloat16_only():
    with pytest.raises(UserError, match="--weights packed12 is for bfloat16, not for float32"):
        reference_registry(weights="packed12").select(CPU, torch.float32)
