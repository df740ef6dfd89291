"""Experts in a checkpoint's codes against the formula written down anew, compiled and in the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from published_formats import pack

from labinfer.functions.cpu.expert_cache import ExpertCache
from labinfer.functions.cpu.experts import CpuExperts
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.functions import ExpertFunctions, Functions
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.functions.packed_weight import TABLES
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.launch.providers import make_registry, reference_registry
from labinfer.weights.codes import Codes, QuantLayout, unpack

CPU = torch.device("cpu")
EXPERTS, CHOSEN = 5, 3
FORMS = [
    *((4, 32, ""), (4, 16, "zeros"), (4, 128, ""), (4, 64, "zeros"), (8, 32, ""), (8, 128, "zeros"), (8, 0, "")),
    *(
        (4, 32, "minima"),
        (8, 32, "minima"),
        (4, 32, "e2m1"),
        (4, 16, "nvfp4"),
        (4, 32, "iq4"),
        (5, 32, ""),
        (5, 64, "minima"),
    ),
]
"""Bits, group, and what groups have beside scales, or the table of their numbers."""
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


def code_form(form: tuple[int, int, str]) -> QuantLayout:
    """Of bits, a group's inputs, and the kind of offsets or the table."""
    bits, group, kind = form
    table = kind if kind in TABLES else ""
    return QuantLayout(bits, group, has_zeros=kind == "zeros", has_minima=kind == "minima", table=table)


def random_codes(outputs: int, inputs: int, form: tuple[int, int, str], lead: int = 0):
    """(codes, the values of the inputs behind ``lead``); what is held before and after them is random, too."""
    bits, group, kind = form
    groups = -(-(lead + inputs) // group) if group else 1
    size = groups * group if group else -(-inputs // 4) * 4
    numbers = torch.randint(0, 2**bits, (outputs, size))
    zeros = torch.full((outputs, groups), 2 ** (bits - 1))
    if kind == "zeros":
        zeros = torch.randint(0, 2**bits, (outputs, groups))
    scales = ((0.5 + torch.rand(outputs, groups)) * 2.0 ** (-bits - 1)).half().float()
    minima = -(torch.rand(outputs, groups) * 0.5).half().float()
    if kind == "e2m1":
        scales = 2.0 ** torch.randint(-9, -5, (outputs, groups)).float()
    of_input = torch.arange(size) // group if group else torch.zeros(size).long()
    whole = torch.tensor(TABLES[kind])[numbers] if kind in TABLES and kind else numbers - zeros[:, of_input]
    values = (numbers if kind == "minima" else whole).double() * scales.double()[:, of_input]
    if kind == "minima":
        values += minima.double()[:, of_input]
    packed = pack_fives(numbers) if bits == 5 else pack(numbers, bits, 1)
    words = torch.empty(packed.shape, dtype=torch.int32).copy_(packed)  # with the usual strides, also of a single word
    codes = Codes(
        form=code_form(form),
        columns=(lead, lead + inputs),
        words=words,
        scales=scales,
        zeros=zeros.to(torch.uint8) if kind == "zeros" else None,
        minima=minima if kind == "minima" else None,
    )
    return codes, values[:, lead : lead + inputs]


def pack_fives(numbers: torch.Tensor) -> torch.Tensor:
    """Codes of 5 bits, see ``weights.codes``."""
    first, second = numbers.unflatten(1, (-1, 2, 4)).unbind(2)
    words = pack((first + (second >> 2) * 32).flatten(1), 8, 1)
    lower = pack((second & 3).unflatten(1, (-1, 4)).transpose(2, 3).flatten(1), 2, 1)
    return torch.cat([lower.unsqueeze(2), words.unflatten(1, (-1, 4))], dim=2).flatten(1)


def make(own: ExpertFunctions, form: tuple[int, int, str], hidden: int, columns: int, lead: int, dtype=torch.float32):
    """(experts, their matrices as pairs)."""
    group = form[1]
    lead = lead % group if group else 0
    packed = own.make_experts(ExpertShape(EXPERTS, hidden, (lead, lead + columns), dtype, code_form(form)), CPU)
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


@pytest.mark.each_value("functions")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("hidden", "columns", "lead"), SIZES)
def test_coded_experts_are_those_of_the_formula(functions, form, hidden, columns, lead):
    own = functions.coded_experts[QuantLayout(form[0]).quantization]
    packed, matrices = make(own, form, hidden, columns, lead)
    for tokens in (1, 5, 40):
        x, (ids, weights) = torch.randn(tokens, hidden), route(tokens)
        x[tokens // 2] = 0
        got, wanted = (
            own.experts(x, ids, weights, ExpertMLPs(packed)),
            expected(x, ids, weights, matrices, torch.float32),
        )
        # an activation that lies between two numbers may become either
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0.05 * float(wanted.abs().mean()))
        assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_coded_experts_take_activations_of_16_bits(compiled_functions, form, dtype):
    cpu = CpuExperts(compiled_functions)
    quantization = QuantLayout(form[0]).quantization
    own = ExpertFunctions(**cpu.calls(quantization, 0), target="experts", quantization=quantization)
    packed, matrices = make(own, form, 70, 50, 16, dtype)
    x, (ids, weights) = torch.randn(9, 70).to(dtype), route(9)
    got = own.experts(x, ids, weights, ExpertMLPs(packed))
    wanted = expected(x, ids, weights, matrices, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert got.dtype == dtype
    assert (got.float() - wanted).norm() <= 6e-3 * wanted.norm()
    same = packed.clone()
    packed.data_EB.zero_()
    assert torch.equal(own.experts(x, ids, weights, ExpertMLPs(same)), got)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_size_of_coded_experts_is_known_before_they_are_packed(form):
    own = reference_registry().select(CPU, torch.float32).coded_experts[QuantLayout(form[0]).quantization]
    packed, _ = make(own, form, 70, 50, 16)
    assert packed.nbytes == sum(a.nbytes + b.nbytes for a, b in packed.pairs)
    assert packed.clone().nbytes == packed.nbytes


def test_coded_experts_may_be_in_a_file(compiled_functions, tmp_path):
    """Room for three of the five."""
    functions = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)]).select(CPU, torch.float32)
    form = (4, 32, True)
    resident, _ = make(functions.coded_experts["int4"], form, 70, 40, 16)
    cache = ExpertCache(compiled_functions, 3 * resident.nbytes // EXPERTS, tmp_path)
    own = cache.offload(functions).coded_experts["int4"]
    torch.manual_seed(0)
    offloaded, _ = make(own, form, 70, 40, 16)
    assert offloaded.nbytes == resident.nbytes
    for tokens in (1, 30):
        x, (ids, weights) = torch.randn(tokens, 70), route(tokens)
        assert torch.equal(
            own.experts(x, ids, weights, ExpertMLPs(offloaded)), own.experts(x, ids, weights, ExpertMLPs(resident))
        )
    assert cache.stats.misses > 0


def test_registry_has_experts_for_codes_under_a_target_of_their_own():
    functions = reference_registry().select(CPU, torch.float32, quantization="int4")
    targets = {own.target: own.quantization for own in (functions.experts, *functions.coded_experts.values())}
    assert targets == {"experts": "int4", "int8.experts": "int8", "int4.experts": "int4"}


@pytest.mark.parametrize("table", ["e2m1", "iq4"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_numbers_of_a_table_give_the_bits_of_the_same_numbers(compiled_functions, table, tokens):
    """Experts and a matrix of whole groups, in codes of 4 bits, and in those of 8 bits for the same numbers."""
    functions = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)]).select(CPU, torch.float32)
    hidden, columns = 96, 64
    shape = ExpertShape(EXPERTS, hidden, (0, columns), torch.float32)
    few, many = (
        functions.coded_experts[form.quantization].make_experts(replace(shape, form=form), CPU)
        for form in (QuantLayout(4, 32, table=table), QuantLayout(8, 32))
    )
    for index in range(EXPERTS):
        both = [random_codes(*sizes, (4, 32, table))[0] for sizes in ((2 * columns, hidden), (hidden, columns))]
        few.pack_codes(index, *both)
        many.pack_codes(index, *(in_8_bits(codes, table) for codes in both))
    assert few.nbytes < 0.58 * many.nbytes
    x, (ids, weights) = torch.randn(tokens, hidden), route(tokens)
    got, wanted = (
        functions.coded_experts[own].experts(x, ids, weights, ExpertMLPs(packed))
        for own, packed in (("int4", few), ("int8", many))
    )
    assert torch.equal(got, wanted)
    codes, _ = random_codes(70, hidden, (4, 32, table))
    products = []
    for given in (codes, in_8_bits(codes, table)):
        own = given.form.quantization
        packed = functions.codes[own].pack_codes(given, torch.float32)
        products.append(functions.codes[own].linear(x, packed))
    assert torch.equal(*products)


def in_8_bits(codes: Codes, table: str) -> Codes:
    """The numbers that codes of a table stand for, as codes of 8 bits."""
    numbers = torch.tensor(TABLES[table])[unpack(codes.words, 4).long()] + 128
    words = numbers.to(torch.uint8).view(torch.int32)
    return replace(codes, form=QuantLayout(8, codes.form.group), words=words)


OFFSETS = [
    (4, 32, ""),
    (4, 32, "zeros"),
    (4, 32, "minima"),
    (8, 32, "minima"),
    (8, 16, ""),
    (4, 32, "e2m1"),
    (4, 16, "nvfp4"),
    (4, 32, "iq4"),
    (5, 32, ""),
    (5, 64, "minima"),
]


@pytest.mark.parametrize("form", OFFSETS, ids=str)
def test_rows_and_products_of_a_matrix_in_codes_are_those_of_its_values(functions, form):
    bits, group, kind = form
    own, lead = functions.codes[QuantLayout(bits).quantization], 16 % group
    codes, values = random_codes(70, 90, form, lead)
    packed = own.pack_codes(codes, torch.float32)
    ids = torch.tensor([5, 74, 3, 4, 73, 90])
    rows = own.embedding(ids, packed, 5)
    inside = (ids >= 5) & (ids < 75)
    torch.testing.assert_close(rows[inside], values[ids[inside] - 5].float(), rtol=1e-6, atol=1e-7)
    assert not rows[~inside].any()
    for tokens in (1, 7, 30):
        x = torch.randn(tokens, 90)
        torch.testing.assert_close(own.linear(x, packed), (rounded(x) @ values.T).float(), rtol=1e-5, atol=1e-5)
