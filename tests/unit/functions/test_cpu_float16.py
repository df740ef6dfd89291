"""Compiled products with float16 weights against exact ones, and rows of a packed table."""

from __future__ import annotations

import pytest
import torch

from labinfer.functions.cpu.float16 import CpuFloat16
from labinfer.functions.providers import make_registry
from labinfer.functions.reference.provider import ReferenceProvider


@pytest.fixture(scope="module")
def cpu(compiled_functions) -> CpuFloat16:
    return CpuFloat16(compiled_functions)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 13, 14, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (64, 128), (31, 6), (70, 131), (33, 257), (1, 1)])
def test_linear_rounds_once(cpu, tokens, outputs, inputs):
    for biased in (False, True):
        x, weight = torch.randn(tokens, inputs).half(), torch.randn(outputs, inputs).half()
        bias = torch.randn(outputs).half() if biased else None
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        got = cpu.linear(x, cpu.pack_weight(weight.clone()), bias)
        torch.testing.assert_close(got.double(), exact, rtol=2**-11, atol=1e-4)


def test_row_is_the_same_whatever_stands_beside_it(cpu):
    weight, x = cpu.pack_weight(torch.randn(70, 300).half()), torch.randn(30, 300).half()
    together = cpu.linear(x, weight)
    assert all(torch.equal(cpu.linear(x[i : i + 1], weight)[0], together[i]) for i in range(30))


def test_numbers_that_are_not_finite_and_denormal_ones_stay(cpu):
    x = torch.tensor([[1.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0], [65504.0, 65504.0]]).half()
    weight = torch.full((33, 2), 2.0**-24).half()
    weight[0] = 1
    got = cpu.linear(x, cpu.pack_weight(weight.clone()))
    assert got[0, 1] == 2.0**-24 and got[1, 0] == got[3, 0] == float("inf") and got[2].isnan().all()


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 16), (70, 131), (31, 7)])
def test_embedding_finds_rows(cpu, outputs, inputs):
    table = torch.randn(outputs, inputs).half()
    ids = torch.tensor([9, 10, 10 + outputs - 1, 10 + outputs, 11])
    rows = cpu.embedding(ids, cpu.pack_weight(table.clone()), 10)
    zeros = torch.zeros(inputs).half()
    assert torch.equal(rows, torch.stack([zeros, table[0], table[-1], zeros, table[1 % outputs]]))


def test_float16_models_take_them(compiled_functions):
    from labinfer.functions.cpu.provider import CpuProvider

    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    functions = registry.select(torch.device("cpu"), torch.float16)
    weight = torch.randn(40, 8).half()
    packed = functions.matrices["layer"].pack_weight(weight.clone())
    assert not torch.equal(packed.data, weight)  # in panels
