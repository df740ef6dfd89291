"""Experts in a checkpoint's codes against the formula written down anew, compiled and in the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from published_formats import pack

from labinfer.functions.cpu.expert_arena import ExpertArena
from labinfer.functions.cpu.experts import CpuExperts
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.packed_experts import ExpertForm
from labinfer.functions.protocols import ExpertFunctions, Functions
from labinfer.functions.providers import make_registry, reference_registry
from labinfer.functions.reference.provider import ReferenceProvider

CPU = torch.device("cpu")
EXPERTS, CHOSEN = 5, 3
FORMS = [(4, 32, False), (4, 16, True), (4, 128, False), (4, 64, True), (8, 32, False), (8, 128, True), (8, 0, False)]
"""Bits, group, zero points."""
SIZES = [(64, 32, 0), (96, 48, 16), (40, 24, 8), (33, 17, 0), (70, 130, 48), (8, 2, 5)]
"""Hidden size, columns, and inputs of down that are held before them."""


@pytest.fixture(params=["reference", "compiled"])
def functions(request, load_functions) -> Functions:
    if request.param == "reference":
        return reference_registry().select(CPU, torch.float32)
    return make_registry([ReferenceProvider(), CpuProvider(load_functions())]).select(CPU, torch.float32)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_codes(outputs: int, inputs: int, form: tuple[int, int, bool], lead: int = 0):
    """(codes, the values of the inputs behind ``lead``); what is held before and after them is random, too."""
    bits, group, has_zeros = form
    groups = -(-(lead + inputs) // group) if group else 1
    size = groups * group if group else -(-inputs // 4) * 4
    numbers = torch.randint(0, 2**bits, (outputs, size))
    zeros = (
        torch.randint(0, 2**bits, (outputs, groups)) if has_zeros else torch.full((outputs, groups), 2 ** (bits - 1))
    )
    scales = ((0.5 + torch.rand(outputs, groups)) * 2.0 ** (-bits - 1)).half().float()
    of_input = torch.arange(size) // group if group else torch.zeros(size).long()
    values = (numbers - zeros[:, of_input]).double() * scales.double()[:, of_input]
    kept = zeros.to(torch.uint8) if has_zeros else None
    packed = pack(numbers, bits, 1)
    words = torch.empty(packed.shape, dtype=torch.int32).copy_(packed)  # with the usual strides, also of a single word
    codes = SimpleNamespace(words=words, scales=scales, zeros=kept)
    return codes, values[:, lead : lead + inputs]


def make(own: ExpertFunctions, form: tuple[int, int, bool], hidden: int, columns: int, lead: int, dtype=torch.float32):
    """(experts, their matrices as pairs)."""
    bits, group, has_zeros = form
    lead = lead % group if group else 0
    packed = own.make_experts(
        num_experts=EXPERTS,
        hidden_size=hidden,
        columns=columns,
        dtype=dtype,
        device=CPU,
        form=ExpertForm(bits=bits, group=group, has_zeros=has_zeros, down_lead=lead),
    )
    matrices = []
    for index in range(EXPERTS):
        gate_up, gate_up_FD = random_codes(2 * columns, hidden, form)
        down, down_DF = random_codes(hidden, columns, form, lead)
        packed.pack_codes(index, gate_up, down)
        for codes in (gate_up, down):  # the memory is used again
            codes.words.fill_(7), codes.scales.fill_(7)
        matrices.append((gate_up_FD, down_DF))
    return packed, matrices


def route(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, EXPERTS).argsort(1)[:, :CHOSEN], torch.rand(tokens, CHOSEN)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """To 8 bits, each row by its largest, as products in whole numbers take them; divided once, so that ties are the same."""
    peaks = rows.float().abs().amax(dim=1, keepdim=True)
    factors = torch.where(peaks > 0, torch.full_like(peaks, 127) / peaks, 0.0)
    return (rows.double() * factors.double()).round() * peaks.double() / 127


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices, dtype: torch.dtype) -> torch.Tensor:
    """Activations between the products are rounded to the dtype first."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert, (gate_up_FD, down_DF) in enumerate(matrices):
        token, slot = torch.where(ids == expert)
        gate, up = (rounded(x[token].float()) @ gate_up_FD.T).chunk(2, dim=1)
        middle = (F.silu(gate) * up).to(dtype).float()
        out[token] += weights[token, slot].unsqueeze(1).double() * (rounded(middle) @ down_DF.T)
    return out.float()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("hidden", "columns", "lead"), SIZES)
def test_coded_experts_are_those_of_the_formula(functions, form, hidden, columns, lead):
    own = functions.coded_experts[f"int{form[0]}"]
    packed, matrices = make(own, form, hidden, columns, lead)
    for tokens in (1, 5, 40):
        x, (ids, weights) = torch.randn(tokens, hidden), route(tokens)
        x[tokens // 2] = 0
        got, wanted = own.experts(x, ids, weights, packed), expected(x, ids, weights, matrices, torch.float32)
        # an activation that lies between two numbers may become either
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0.05 * float(wanted.abs().mean()))
        assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_coded_experts_take_activations_of_16_bits(compiled_functions, form, dtype):
    cpu = CpuExperts(compiled_functions)
    calls = cpu.calls(f"int{form[0]}", 0)
    own = ExpertFunctions(**calls, target="experts", quantization=f"int{form[0]}")
    packed, matrices = make(own, form, 70, 50, 16, dtype)
    x, (ids, weights) = torch.randn(9, 70).to(dtype), route(9)
    got = own.experts(x, ids, weights, packed)
    wanted = expected(x, ids, weights, matrices, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert got.dtype == dtype
    assert (got.float() - wanted).norm() <= 6e-3 * wanted.norm()
    same = packed.clone()
    packed.data_EB.zero_()
    assert torch.equal(own.experts(x, ids, weights, same), got)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_size_of_coded_experts_is_known_before_they_are_packed(form):
    own = reference_registry().select(CPU, torch.float32).coded_experts[f"int{form[0]}"]
    packed, _ = make(own, form, 70, 50, 16)
    assert packed.nbytes == sum(a.nbytes + b.nbytes for a, b in packed.pairs)
    assert packed.clone().nbytes == packed.nbytes


def test_coded_experts_may_be_in_a_file(compiled_functions, tmp_path):
    """Room for three of the five."""
    functions = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)]).select(CPU, torch.float32)
    form = (4, 32, True)
    resident, _ = make(functions.coded_experts["int4"], form, 70, 40, 16)
    arena = ExpertArena(compiled_functions, 3 * resident.nbytes // EXPERTS, tmp_path)
    own = arena.offload(functions).coded_experts["int4"]
    torch.manual_seed(0)
    offloaded, _ = make(own, form, 70, 40, 16)
    assert offloaded.nbytes == resident.nbytes
    for tokens in (1, 30):
        x, (ids, weights) = torch.randn(tokens, 70), route(tokens)
        assert torch.equal(own.experts(x, ids, weights, offloaded), own.experts(x, ids, weights, resident))
    assert arena.stats.misses > 0


def test_registry_has_experts_for_codes_under_a_target_of_their_own():
    functions = reference_registry().select(CPU, torch.float32, quantization="int4")
    targets = {own.target: own.quantization for own in (functions.experts, *functions.coded_experts.values())}
    assert targets == {"experts": "int4", "int8.experts": "int8", "int4.experts": "int4"}
