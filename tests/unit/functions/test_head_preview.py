"""Previews of heads: logits of which only the largest matters."""

from __future__ import annotations

import math
import shutil
from functools import partial

import pytest
import torch
from torch_threads import threads_of_torch

from labinfer.functions.cpu.floats import CpuFunctions
from labinfer.functions.cpu.head_preview import CpuHeadPreview
from labinfer.functions.cpu.packed12 import CpuPacked12
from labinfer.functions.cpu.quantized import CpuQuantized
from labinfer.functions.head_preview import HeadPreview
from labinfer.functions.reference import head_preview, linear, packed12, quantized
from labinfer.native import compiler

INPUTS, ROWS = 96, 3
OUTPUTS = (32, 1000, 4096)
NEVER = -math.inf


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def reference(kind: str):
    pack, product = {
        "bfloat16": (linear.pack_weight, linear.linear),
        "packed12": (packed12.pack_weight, packed12.linear),
        "int8": (quantized.quantize_int8, quantized.linear),
    }[kind]
    round_head = pack if kind == "int8" else None
    make_preview = partial(head_preview.make_preview, round_head=round_head)
    return make_preview, pack, product, head_preview.largest_logits(product)


def compiled(kind: str, library):
    kernel = "dot" if "dot" in library.kernels else ""
    functions = {
        "bfloat16": CpuFunctions(library, kernel),
        "packed12": CpuPacked12(library, kernel),
        "int8": CpuQuantized(library),
    }[kind]
    pack = functions.quantize_int8 if kind == "int8" else functions.pack_weight
    preview = CpuHeadPreview(library, functions.linear, round_head=pack if kind == "int8" else None, kernel=kernel)
    return preview.make_preview, pack, functions.linear, preview.largest_logits


has_compiler = any(map(shutil.which, compiler.COMPILERS))
compiled_too = pytest.mark.skipif(not has_compiler, reason="no C++ compiler, so the functions are not used either")


@pytest.fixture(params=["reference", pytest.param("compiled", marks=compiled_too)])
def make(request, compiled_functions):
    """Functions of a kind of head."""
    return reference if request.param == "reference" else lambda kind: compiled(kind, compiled_functions)


@pytest.mark.pairwise("make")
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", [INPUTS, 50, 33])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["bfloat16", "packed12", "int8"])
def test_logits_are_exact_or_left_out_and_the_largest_is_there(make, kind, outputs, inputs, threads):
    make_preview, pack, product, largest = make(kind)
    weight, x = torch.randn(outputs, inputs).bfloat16() * 0.02, torch.randn(ROWS, inputs).bfloat16()
    preview, packed = make_preview(weight), pack(weight.clone())
    with threads_of_torch(threads):
        exact, got = product(x, packed), largest(x, packed, preview)
    assert torch.equal(torch.where(got == NEVER, exact, got), exact)
    assert torch.equal(got.argmax(1), exact.argmax(1))
    if outputs == 4096 and inputs == INPUTS:
        assert (got == NEVER).float().mean() > 0.3  # otherwise there would be no point


@pytest.mark.parametrize("kind", ["bfloat16", "packed12", "int8"])
def test_nothing_is_left_out_where_a_logit_is_further_off_than_expected(make, kind):
    make_preview, pack, product, largest = make(kind)
    weight, x = torch.randn(4096, INPUTS).bfloat16(), torch.randn(ROWS, INPUTS).bfloat16()
    wrong, packed = make_preview(-weight), pack(weight.clone())
    assert torch.equal(largest(x, packed, wrong), product(x, packed))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_no_numbers_are_not_hidden(make, value):
    make_preview, pack, product, largest = make("bfloat16")
    weight, x = torch.randn(256, INPUTS).bfloat16(), torch.randn(1, INPUTS).bfloat16()
    x[0, 5] = value
    preview, packed = make_preview(weight), pack(weight.clone())
    assert torch.equal(largest(x, packed, preview).isnan(), product(x, packed).isnan())


@compiled_too
def test_compiled_preview_is_that_of_the_reference(compiled_functions):
    weight = torch.randn(70, INPUTS).bfloat16()
    got = compiled("bfloat16", compiled_functions)[0](weight)
    expected: HeadPreview = head_preview.make_preview(weight)
    assert got.unit == expected.unit
    torch.testing.assert_close(got.spread_2O, expected.spread_2O)


def test_errors_of_approximate_logits_are_as_large_as_was_reckoned():
    """In standard deviations, the root mean square is near 1, and no error is anywhere near the bound."""
    weight, x = torch.randn(8192, 896) * 0.02, torch.randn(20, 896)
    preview = head_preview.make_preview(weight)
    logits, errors = head_preview.approximate_logits(x, preview)
    sigmas = (logits - x @ weight.T) / errors * head_preview.SIGMAS
    assert 0.8 < sigmas.square().mean().sqrt() < 1.1
    assert sigmas.abs().max() < 0.75 * head_preview.SIGMAS
