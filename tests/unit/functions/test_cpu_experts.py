"""The compiled experts of a mixture against the reference's products, over sizes that do and do not fill their panels."""

from __future__ import annotations

import ctypes
import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch_threads import threads_of_torch

from labinfer.functions.clamped_gate import ClampedGate
from labinfer.functions.cpu.experts import CpuExperts, CpuPackedExperts
from labinfer.functions.packed_experts import ExpertMLPs, ExpertShape
from labinfer.functions.reference import linear, quantized
from labinfer.launch.core_sharing import SharedCore
from labinfer.native import compiler

CPU = torch.device("cpu")
SIZES = [(64, 32), (128, 48), (40, 24), (33, 17), (70, 130), (2, 1)]
"""Hidden size and columns."""
FORMS = [
    *(("none", 0, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)),
    *(
        (quantization, group, dtype)
        for quantization, group in (("int8", 0), ("int4", 32), ("int4", 64))
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
    ),
]
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler, so the functions are not used either"
)


@pytest.fixture(scope="module")
def cpu(compiled_functions, kernel) -> CpuExperts:
    return CpuExperts(compiled_functions, kernel)


@pytest.fixture(scope="module")
def whole(compiled_functions) -> CpuExperts:
    return CpuExperts(compiled_functions)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def matrices(experts: int, hidden: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(experts, 2 * columns, hidden) / hidden**0.5
    return gate_up.to(dtype), (torch.randn(experts, hidden, columns) / max(1, columns) ** 0.5).to(dtype)


def make(
    cpu: CpuExperts, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor, quantization: str = "none", group: int = 0
) -> CpuPackedExperts:
    """Packed one by one through the same two buffers, as a layer does it."""
    experts, hidden, columns = down_EDF.shape
    shape = ExpertShape(experts, hidden, (0, columns), down_EDF.dtype)
    packed = cpu.calls(quantization, group)["make_experts"](shape, CPU)
    gate_up, down = torch.empty(2 * columns, hidden), torch.empty(hidden, columns)
    gate_up, down = gate_up.to(down_EDF), down.to(down_EDF)
    for index in range(experts):
        gate_up.copy_(gate_up_EFD[index])
        down.copy_(down_EDF[index])
        packed.pack(index, gate_up, down)
        gate_up.fill_(7), down.fill_(7)
    return packed


def route(tokens: int, experts: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts of each token, and their weights."""
    ids_TA = torch.rand(tokens, experts).argsort(1)[:, :chosen]
    return ids_TA, torch.rand(tokens, chosen)


def product(x: torch.Tensor, weight: torch.Tensor, quantization: str, group: int) -> torch.Tensor:
    """The reference's, in float32."""
    if quantization == "none":
        return linear.linear(x, linear.pack_weight(weight.float()))
    pack = {"int8": quantized.quantize_int8, "int4": lambda weight: quantized.quantize_int4(weight, group)}
    return quantized.linear(x, pack[quantization](weight))


def expected(x, ids_TA, weights_TA, gate_up_EFD, down_EDF, quantization="none", group=0, first=0) -> torch.Tensor:
    """In float32, but for activations between the products, which are rounded to the dtype of x."""
    out = torch.zeros(x.shape)
    middle_dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    for expert in range(len(down_EDF)):
        token, slot = torch.where(ids_TA == expert + first)
        if not len(token):
            continue
        gate, up = product(x[token].float(), gate_up_EFD[expert], quantization, group).chunk(2, dim=1)
        middle = (F.silu(gate) * up).to(middle_dtype).float()
        out[token] += weights_TA[token, slot].unsqueeze(1) * product(middle, down_EDF[expert], quantization, group)
    return out


def assert_near(got: torch.Tensor, exact: torch.Tensor, quantization: str) -> None:
    """Within a rounding of the result; in whole numbers also of a few activations: one that lies between two may become either."""
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[got.dtype]
    between = step if quantization == "none" else 0.1
    torch.testing.assert_close(got.float(), exact, rtol=step, atol=between * float(exact.abs().mean()))
    assert (got.float() - exact).norm() <= (step + (0 if quantization == "none" else 2e-3)) * exact.norm()


@pytest.mark.parametrize("tokens", [1, 2, 14, 40])
@pytest.mark.parametrize(("hidden", "columns"), SIZES)
def test_experts_in_bfloat16(cpu, tokens, hidden, columns):
    gate_up, down = matrices(6, hidden, columns, torch.bfloat16)
    x, (ids, weights) = torch.randn(tokens, hidden).bfloat16(), route(tokens, 6, 3)
    packed = make(cpu, gate_up, down)
    exact = expected(x, ids, weights, gate_up, down)
    assert_near(cpu.experts(x, ids, weights, ExpertMLPs(packed)), exact, "none")
    assert_near(
        cpu.experts(x.repeat(1, 2)[:, :hidden], ids, weights, ExpertMLPs(packed)), exact, "none"
    )  # rows that are apart


@pytest.mark.each_value
@pytest.mark.parametrize(("quantization", "group", "dtype"), FORMS[1:], ids=str)
@pytest.mark.parametrize(("hidden", "columns"), SIZES)
def test_experts_in_other_dtypes_and_whole_numbers(whole, quantization, group, dtype, hidden, columns):
    gate_up, down = matrices(6, hidden, columns, dtype)
    packed = make(whole, gate_up, down, quantization, group)
    for tokens in (1, 5, 40):
        x, (ids, weights) = torch.randn(tokens, hidden).to(dtype), route(tokens, 6, 3)
        x[tokens // 2] = 0
        got = whole.experts(x, ids, weights, ExpertMLPs(packed))
        assert got.dtype == dtype
        assert_near(got, expected(x, ids, weights, gate_up, down, quantization, group), quantization)


@pytest.mark.parametrize(("quantization", "group", "dtype"), FORMS, ids=str)
def test_experts_of_a_prompt(whole, quantization, group, dtype):
    """More rows of an expert than are multiplied at once, beside experts with one row or none."""
    experts, tokens, chosen = 12, 2048, 2
    gate_up, down = matrices(experts, 96, 40, dtype)
    x, ids = torch.randn(tokens, 96).to(dtype), torch.tensor([[0, 7]]).repeat(tokens, 1)
    ids[::2, 1], ids[5] = 3, torch.tensor([10, 4])
    weights = torch.rand(tokens, chosen)
    got = whole.experts(x, ids, weights, ExpertMLPs(make(whole, gate_up, down, quantization, group)))
    assert_near(got, expected(x, ids, weights, gate_up, down, quantization, group), quantization)


@pytest.mark.parametrize(("quantization", "group", "dtype"), FORMS, ids=str)
def test_experts_give_a_token_the_same_bits_in_every_batch_and_with_any_threads(whole, quantization, group, dtype):
    gate_up, down = matrices(8, 70, 50, dtype)
    packed = make(whole, gate_up, down, quantization, group)
    x, (ids, weights) = torch.randn(60, 70).to(dtype), route(60, 8, 3)
    together = whole.experts(x, ids, weights, ExpertMLPs(packed))
    for rows in ([17], [59, 3, 17], list(range(0, 60, 2))):
        assert torch.equal(whole.experts(x[rows], ids[rows], weights[rows], ExpertMLPs(packed)), together[rows])
    assert torch.equal(
        whole.experts(x, ids.flip(1), weights.flip(1), ExpertMLPs(packed)), together
    )  # the order of slots is none
    for count in (1, 3, 7):
        with threads_of_torch(count):
            assert torch.equal(whole.experts(x, ids, weights, ExpertMLPs(packed)), together)


@pytest.mark.parametrize(("quantization", "group", "dtype"), FORMS, ids=str)
def test_experts_dealt_in_many_pieces_give_the_same_bits(compiled_functions, whole, quantization, group, dtype):
    """Of one expert's many rows and of others' few; more threads than panels, and an idle core of another process."""
    packed = make(whole, *matrices(8, 300, 50, dtype), quantization, group)
    x, (ids, weights) = torch.randn(160, 300).to(dtype), route(160, 8, 3)
    ids[:40] = torch.tensor([7, 1, 2])
    few = ids[:3]
    with threads_of_torch(1):
        alone = (
            whole.experts(x, ids, weights, ExpertMLPs(packed)),
            whole.experts(x[:3], few, weights[:3], ExpertMLPs(packed)),
        )
    is_idle = ctypes.c_uint32(1)
    shared = SharedCore(ctypes.addressof(is_idle), min(os.sched_getaffinity(0)))
    for count_shared in (0, 1):
        compiled_functions.compiled.use_idle_cores(ctypes.byref(shared), count_shared)
        for count in (1, 2, 5, 24):
            with threads_of_torch(count):
                assert torch.equal(whole.experts(x, ids, weights, ExpertMLPs(packed)), alone[0])
                assert torch.equal(whole.experts(x[:3], few, weights[:3], ExpertMLPs(packed)), alone[1])
    compiled_functions.compiled.use_idle_cores(None, 0)
    whole.experts(x, ids, weights, ExpertMLPs(packed))  # no thread reads is_idle after this


@pytest.mark.parametrize("tokens", [1, 9, 400])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("quantization", "group"), [("int8", 0), ("int4", 32), ("int4", 64)])
def test_experts_in_tiles_come_to_the_same_bits(compiled_functions, whole, quantization, group, dtype, tokens):
    """Whole numbers are summed exactly."""
    if "amx" not in compiled_functions.kernels:
        pytest.skip("this processor has no AMX")
    tiles = CpuExperts(compiled_functions, "amx")
    packed = make(whole, *matrices(6, 70, 130, dtype), quantization, group)
    x, (ids, weights) = torch.randn(tokens, 70).to(dtype), route(tokens, 6, 3)
    assert torch.equal(
        tiles.experts(x, ids, weights, ExpertMLPs(packed)), whole.experts(x, ids, weights, ExpertMLPs(packed))
    )


def test_experts_of_other_ranks_add_nothing(cpu):
    gate_up, down = matrices(6, 64, 32, torch.bfloat16)
    x, (ids, weights) = torch.randn(9, 64).bfloat16(), route(9, 6, 3)
    for first, last in ((0, 4), (4, 6), (2, 2)):
        own = gate_up[first:last], down[first:last]
        got = cpu.experts(x, ids, weights, ExpertMLPs(make(cpu, *own), first=first))
        assert_near(got, expected(x, ids, weights, *own, first=first), "none")
    assert not got.any()


@pytest.mark.parametrize(("quantization", "group", "dtype"), FORMS, ids=str)
def test_experts_without_columns_add_nothing(whole, quantization, group, dtype):
    """A rank has none where there are more ranks than columns."""
    packed = make(whole, *matrices(4, 64, 0, dtype), quantization, group)
    got = whole.experts(torch.randn(5, 64).to(dtype), *route(5, 4, 2), ExpertMLPs(packed))
    assert got.shape == (5, 64) and not got.any()


def test_experts_of_no_tokens_are_nothing(cpu):
    packed = make(cpu, *matrices(6, 64, 32, torch.bfloat16))
    ids, weights = route(0, 6, 3)
    assert cpu.experts(torch.empty(0, 64).bfloat16(), ids, weights, ExpertMLPs(packed)).shape == (0, 64)


@pytest.mark.parametrize(("quantization", "group", "dtype"), FORMS, ids=str)
def test_numbers_that_are_none_spoil_their_own_token_only(whole, quantization, group, dtype):
    gate_up, down = matrices(4, 64, 32, dtype)
    packed = make(whole, gate_up, down, quantization, group)
    x, (ids, weights) = torch.randn(5, 64).to(dtype), route(5, 4, 2)
    good = whole.experts(x, ids, weights, ExpertMLPs(packed))
    x[2, 5] = float("nan")
    got, others = whole.experts(x, ids, weights, ExpertMLPs(packed)), [0, 1, 3, 4]
    assert torch.equal(got[others], good[others])
    assert not got[2].isfinite().any()


@pytest.mark.parametrize(("quantization", "group", "dtype"), FORMS, ids=str)
def test_clone_of_experts_has_memory_of_its_own(whole, quantization, group, dtype):
    packed = make(whole, *matrices(4, 64, 32, dtype), quantization, group)
    x, (ids, weights) = torch.randn(3, 64).to(dtype), route(3, 4, 2)
    before, same = whole.experts(x, ids, weights, ExpertMLPs(packed)), packed.clone()
    assert same.nbytes == packed.nbytes == packed.data_EB.nbytes
    packed.data_EB.zero_()
    assert torch.equal(whole.experts(x, ids, weights, ExpertMLPs(same)), before)


@pytest.mark.parametrize(("hidden", "columns"), [(64, 32), (33, 17), (70, 130)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "gate_limit", "offset"), [(1, 1.5, 1.0), (40, 1.5, 1.0), (40, 0.7, 0.0)])
def test_clamped_gate_and_biases(cpu, hidden, columns, dtype, tokens, gate_limit, offset):
    """Sizes that do not fill panels; some activations are at both limits, and one expert is elsewhere."""
    gate_up, down = matrices(5, hidden, columns, dtype)
    x, (ids, weights) = torch.randn(tokens, hidden).to(dtype), route(tokens, 6, 3)
    biases = [F.pad(torch.randn(5, size), (0, -size % 32)) for size in (columns, columns, hidden)]
    bounds = dict(zip(("gate_EF", "up_EF", "down_ED"), biases, strict=True))
    gate = ClampedGate(alpha=1.7, limit=1.5, gate_limit=gate_limit, offset=offset, **bounds)
    got = cpu.experts(x, ids, weights, ExpertMLPs(make(cpu, gate_up, down), gate=gate))
    out = torch.zeros(tokens, hidden)
    for expert in range(5):
        token, slot = torch.where(ids == expert)
        gate, up = (x[token].float() @ gate_up[expert].float().T).chunk(2, dim=1)
        gate = (gate + biases[0][expert, :columns]).clamp(max=gate_limit)
        up = (up + biases[1][expert, :columns]).clamp(-1.5, 1.5) + offset
        middle = (gate * torch.sigmoid(1.7 * gate) * up).to(dtype).float()
        products = middle @ down[expert].float().T + biases[2][expert, :hidden]
        out[token] += weights[token, slot].unsqueeze(1) * products
    assert_near(got, out, "none")


@pytest.mark.parametrize(("hidden", "columns"), [(64, 32), (33, 17)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 40])
def test_gelu_of_experts(cpu, hidden, columns, dtype, tokens):
    gate_up, down = matrices(5, hidden, columns, dtype)
    x, (ids, weights) = torch.randn(tokens, hidden).to(dtype), route(tokens, 5, 3)
    got = cpu.experts(x, ids, weights, ExpertMLPs(make(cpu, gate_up, down), gelu=True))
    out = torch.zeros(tokens, hidden)
    for expert in range(5):
        token, slot = torch.where(ids == expert)
        gate, up = (x[token].float() @ gate_up[expert].float().T).chunk(2, dim=1)
        middle = (F.gelu(gate, approximate="tanh") * up).to(dtype).float()
        out[token] += weights[token, slot].unsqueeze(1) * (middle @ down[expert].float().T)
    assert_near(got, out, "none")
