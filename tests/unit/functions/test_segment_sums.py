"""Products of segments that are added in one call have the bits of the products one by one, added along the same tree."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.graph import CpuCapture
from labinfer.functions.cpu.packed12 import CpuPacked12, CpuPacked12Weight
from labinfer.functions.cpu.quantized import CpuQuantized
from labinfer.functions.packed_weight import DenseWeight
from labinfer.functions.segmented_weight import SegmentedWeight

SIZES = {"even": (48, 32, 64, 160, 16, 30), "odd": (47, 33, 64, 1, 15, 160), "long": (600, 300, 300)}
"""Inputs of each segment."""
ADDITIONS = {6: (0, 1, 1, 0, 0, 3), 3: (0, 0, 2)}
"""Additions after each segment, for one sum."""
FORMS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "dot": torch.bfloat16,
    "12 bits": torch.bfloat16,
    "int8": torch.bfloat16,
    "int8 float32": torch.float32,
    "int4": torch.bfloat16,
    "int4 float16": torch.float16,
    "int4 in bytes": torch.bfloat16,
}


def packer(library, form: str):
    """(product, packing) of a form."""
    if form == "12 bits":
        functions = CpuPacked12(library, library.kernels[-1])
        return functions.linear, functions.pack_weight
    if form.startswith("int"):
        in_bytes = form.endswith("bytes")
        if in_bytes and library.bytes_kernel is None:
            pytest.skip("this processor has no products in bytes")
        functions = CpuQuantized(library, in_bytes=in_bytes)
        if form.startswith("int8"):
            return functions.linear, functions.quantize_int8
        return functions.linear, lambda weight_OI: functions.quantize_int4(weight_OI, 32)
    functions = CpuFunctions(library, library.kernels[-1] if form == "dot" else "", FORMS[form])
    return functions.linear, functions.pack_weight


def add_on_a_stack(products: list[torch.Tensor], additions: tuple[int, ...]) -> list[torch.Tensor]:
    stack: list[torch.Tensor] = []
    for product, count in zip(products, additions, strict=True):
        stack.append(product)
        for _ in range(count):
            last = stack.pop()
            stack[-1] = stack[-1] + last
    return stack


@pytest.mark.parametrize("outputs", [416, 96, 70, 20])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_sums_have_the_bits_of_products_one_by_one(compiled_functions, form, sizes, outputs):
    torch.manual_seed(0)
    linear, pack = packer(compiled_functions, form)
    bounds = [0, *accumulate(sizes)]
    weight_OI = (torch.randn(outputs, bounds[-1]) * 0.02).to(FORMS[form])
    segments = tuple(pack(weight_OI[:, begin:end].clone()) for begin, end in pairwise(bounds))
    additions = ADDITIONS[len(sizes)]
    for rows in (0, 1, 2, 7, 16, 45, 700):
        x_TI = torch.randn(rows, bounds[-1]).to(FORMS[form])
        with threads_of_torch(2):
            alone = [
                linear(x_TI[:, begin:end], SegmentedWeight(segments=(segment,), additions=(0,), num_sums=1))[0]
                for segment, (begin, end) in zip(segments, pairwise(bounds), strict=True)
            ]
            products = [
                linear(x_TI[:, begin:end], segment)
                for segment, (begin, end) in zip(segments, pairwise(bounds), strict=True)
            ]
            out_TO = linear(x_TI, SegmentedWeight(segments=segments, additions=additions))
            left = (*additions[:-1], additions[-1] - 1)
            sums = linear(x_TI, SegmentedWeight(segments=segments, additions=left, num_sums=3))
        assert all(torch.equal(part.to(x_TI.dtype), each) for part, each in zip(alone, products, strict=True))
        (wanted,) = add_on_a_stack(alone, additions)
        assert out_TO.dtype == x_TI.dtype and torch.equal(out_TO, wanted.to(x_TI.dtype))
        assert sums.shape == (3, rows, outputs) and sums.dtype == torch.float32
        assert torch.equal(sums[:2], torch.stack(add_on_a_stack(alone, left)))


def test_segments_may_be_in_12_and_in_16_bits(compiled_functions):
    """A matrix that cannot be compressed is beside others that are."""
    functions = CpuPacked12(compiled_functions)
    plain = CpuFunctions(compiled_functions)
    weights = [(torch.randn(64, 32) * 0.02).bfloat16() for _ in range(2)]
    weights[1] *= torch.exp2(torch.randint(-60, 60, (64, 32)).float()).bfloat16()
    segments = tuple(functions.pack_weight(each.clone()) for each in weights)
    assert list(map(type, segments)) == [CpuPacked12Weight, DenseWeight]
    x_TI = torch.randn(3, 64).bfloat16()
    same = tuple(plain.pack_weight(each.clone()) for each in weights)
    got, wanted = (
        each.linear(x_TI, SegmentedWeight(segments=parts, additions=(0, 1)))
        for each, parts in ((functions, segments), (plain, same))
    )
    assert torch.equal(got, wanted)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [(32, 32), (33, 31)])
def test_sums_are_captured(compiled_functions, sizes):
    """Also of odd numbers of inputs, alone and in segments."""
    torch.manual_seed(0)
    functions = CpuFunctions(compiled_functions)
    parts = [functions.pack_weight(torch.randn(70, size).bfloat16()) for size in sizes]
    weight = SegmentedWeight(segments=tuple(parts), additions=(0, 1))
    first = functions.pack_weight(torch.randn(70, sizes[0]).bfloat16())
    x_TI = torch.randn(2, 64).bfloat16()

    def step() -> torch.Tensor:
        return functions.linear(x_TI, weight) + functions.linear(x_TI[:, : sizes[0]], first)

    out, graph = CpuCapture(compiled_functions)(step)
    assert graph is not None
    x_TI.normal_()
    graph.replay()
    assert torch.equal(out, step())
