"""The reference of a mixture's experts: sums written down anew, ranges of ids, and sizes without memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from labinfer.functions.functions import Functions
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape, PackedExperts
from labinfer.launch.providers import reference_registry

CPU = torch.device("cpu")
EXPERTS, HIDDEN, COLUMNS, TOKENS, CHOSEN = 6, 40, 24, 5, 3


def select(quantization: str = "none", dtype: torch.dtype = torch.float32) -> Functions:
    return reference_registry(32).select(CPU, dtype, quantization=quantization)


def make(functions: Functions, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor) -> PackedExperts:
    """Packed one by one through the same two buffers, as a layer does it."""
    experts, columns = len(down_EDF), down_EDF.shape[2]
    shape = ExpertShape(experts, down_EDF.shape[1], (0, columns), down_EDF.dtype)
    packed = functions.experts.make_experts(shape, CPU)
    gate_up, down = gate_up_EFD.new_empty(gate_up_EFD.shape[1:]), down_EDF.new_empty(down_EDF.shape[1:])
    for index in range(experts):
        gate_up.copy_(gate_up_EFD[index])
        down.copy_(down_EDF[index])
        packed.pack(index, gate_up, down)
    return packed


def case(dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    gate_up = (0.3 * torch.randn(EXPERTS, 2 * COLUMNS, HIDDEN)).to(dtype)
    down = (0.3 * torch.randn(EXPERTS, HIDDEN, COLUMNS)).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    return x, gate_up, down, ids, torch.rand(TOKENS, CHOSEN)


def expected(x, gate_up, down, ids, weights) -> torch.Tensor:
    out = torch.zeros(x.shape)
    for token, chosen in enumerate(ids.tolist()):
        for expert, weight in zip(chosen, weights[token], strict=True):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            out[token] += weight * (down[expert].float() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize(
    ("quantization", "dtype", "tolerance"),
    [
        ("none", torch.float32, 1e-6),
        ("none", torch.bfloat16, 0.02),
        ("int8", torch.float32, 0.03),
        ("int4", torch.float32, 0.2),
    ],
)
def test_experts_are_weighted_gated_mlps(quantization, dtype, tolerance):
    functions, given = select(quantization, dtype), case(dtype)
    x, gate_up, down, ids, weights = given
    out = functions.experts.experts(x, ids, weights, ExpertMLPs(make(functions, gate_up, down)))
    wanted = expected(*given)
    assert out.dtype == dtype
    assert (out.float() - wanted).abs().max() < tolerance * wanted.abs().max()
    assert functions.experts.quantization == quantization


def test_experts_of_other_ranks_add_nothing():
    functions = select()
    x, gate_up, down, ids, weights = case()
    whole = functions.experts.experts(x, ids, weights, ExpertMLPs(make(functions, gate_up, down)))
    parts = [
        functions.experts.experts(x, ids, weights, ExpertMLPs(make(functions, gate_up[a:b], down[a:b]), first=a))
        for a, b in ((0, 4), (4, 4), (4, 6))
    ]
    torch.testing.assert_close(sum(parts), whole)
    assert not parts[1].any()


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_experts_size_is_known_before_they_are_packed(quantization):
    functions = select(quantization)
    _, gate_up, down, _, _ = case()
    packed = make(functions, gate_up, down)
    assert packed.nbytes == sum(a.nbytes + b.nbytes for a, b in packed.pairs)
    shape = ExpertShape(EXPERTS, HIDDEN, (0, COLUMNS), torch.float32)
    on_meta = functions.experts.make_experts(shape, torch.device("meta"))
    assert on_meta.nbytes == packed.nbytes
