"""The scan and the gated norm of Mamba-2: both forms of the reference, and the compiled functions against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recurrent_batches import COUNTS, EARLIER, SLOTS, batch_of, needs_compiler

from labinfer.functions.cpu.mamba import CpuMamba
from labinfer.functions.mamba_heads import MambaHeads
from labinfer.functions.reference import mamba as reference

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
SIZES = [
    ((0, 0, 1, 1), 16, 64),
    ((0, 0, 1), 19, 36),  # a group that serves fewer heads here than elsewhere, and sizes that fill no vector
    ((0, 1), 128, 80),
    ((0,), 3, 5),
]
"""Group of each head, N and P."""


@pytest.fixture
def cpu(compiled_functions) -> CpuMamba:
    return CpuMamba(compiled_functions)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def scan_arguments(groups, state_size, head_size, num_tokens, dtype=torch.float32, limits=(0.0, float("inf"))):
    num_heads = len(groups)
    xbc = torch.randn(num_tokens, num_heads * head_size + 2 * (max(groups) + 1) * state_size)
    xbc[:, num_heads * head_size :] *= state_size**-0.25  # so that products of B and C, and the outputs, are near 1
    xbc = xbc.to(dtype)
    dt = torch.randn(num_tokens, 2 * num_heads).to(dtype)[:, num_heads:] * 4  # rows that are not next to each other
    rate_H, bias_H, skip_H = torch.rand(num_heads) * 4, torch.randn(num_heads), torch.randn(num_heads)
    each = {"rate_H": rate_H, "bias_H": bias_H, "skip_H": skip_H, "groups_H": torch.tensor(groups)}
    return xbc, dt, MambaHeads(**each, min_dt=limits[0], max_dt=limits[1])


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.2, 1.5)], ids=str)
def test_both_forms_of_the_reference_are_the_papers_recurrence(limits):
    """In float64, with loops over heads; the prompt of 150 tokens is longer than two chunks."""
    groups, size, head_size = (0, 0, 1), 5, 7
    xbc, dt, heads = scan_arguments(groups, size, head_size, 151, limits=limits)
    before = torch.randn(2, 3, size, head_size)
    state, batch = before.clone(), batch_of([150, 1], [4, 9], [1, 0])
    got = reference.selective_scan(xbc, dt, state, batch, heads)
    x, b, c = xbc.double().split((21, 10, 10), dim=1)
    for rows, slot in ((range(150), 1), (range(150, 151), 0)):
        for head, group in enumerate(groups):
            exact = before[slot, head].double()
            for row in rows:
                step = F.softplus(dt[row, head].double() + heads.bias_H[head]).clamp(*limits)
                inputs = x[row, 7 * head : 7 * head + 7]
                key, query = (y[row, 5 * group : 5 * group + 5] for y in (b, c))
                exact = (-heads.rate_H[head] * step).exp() * exact + torch.outer(key, step * inputs)
                wanted = query @ exact + heads.skip_H[head] * inputs
                torch.testing.assert_close(got[row, head].double(), wanted, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(state[slot, head].double(), exact, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(("groups", "state_size", "head_size"), SIZES)
@DTYPES
def test_compiled_scan_is_the_references(cpu, groups, state_size, head_size, dtype):
    xbc, dt, heads = scan_arguments(groups, state_size, head_size, sum(COUNTS), dtype, (0.001, 8.0))
    batch, state = batch_of(COUNTS, EARLIER, SLOTS), torch.randn(6, len(groups), state_size, head_size)
    exact_state, untouched = state.clone(), state[2].clone()
    exact = reference.selective_scan(xbc.float(), dt.float(), exact_state, batch, heads)
    got = cpu.selective_scan(xbc, dt, state, batch, heads)
    assert got.dtype == dtype and torch.equal(state[2], untouched)
    torch.testing.assert_close(state, exact_state, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got.float(), exact, rtol=ROUNDING[dtype], atol=3e-5)


@needs_compiler
@pytest.mark.parametrize(("groups", "state_size", "head_size"), SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_scan_has_equal_bits_in_any_chunks_and_batches(cpu, groups, state_size, head_size, threads):
    """A prompt of 70 tokens at once, one token at a time, and in chunks beside another sequence. With more threads than sequences and
    heads, the columns of a head are computed apart."""
    xbc, dt, heads = scan_arguments(groups, state_size, head_size, 70, torch.bfloat16)
    other = scan_arguments(groups, state_size, head_size, 7, torch.bfloat16)
    torch.set_num_threads(threads)
    results = []
    for counts, beside in (([70], 0), ([1] * 70, 0), ([3, 40, 27], 7)):
        state, outs, done = torch.randn(3, len(groups), state_size, head_size), [], 0
        for count in counts:
            rows = slice(done, done + count)
            batch = batch_of([beside, count], [0, done], [0, 2]) if beside else batch_of([count], [done], [2])
            inputs = (torch.cat((more[:beside], own[rows])) for more, own in ((other[0], xbc), (other[1], dt)))
            outs.append(cpu.selective_scan(*inputs, state, batch, heads)[beside:])
            done += count
        results.append((torch.cat(outs), state[2]))
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1])


@needs_compiler
@pytest.mark.parametrize("size", [16, 20, 256])
@DTYPES
def test_compiled_gated_group_norm_is_the_references(cpu, size, dtype):
    x, gate = torch.randn(7, 3 * size).to(dtype), torch.randn(7, 3 * size + 5).to(dtype)[:, 5:]
    weight = torch.randn(3 * size).to(dtype)
    gated = (x.double() * F.silu(gate.double())).unflatten(1, (3, size))
    exact = (gated / (gated.square().mean(2, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight.double()
    for got in (cpu.gated_group_norm(x, gate, weight, 3, 1e-5), reference.gated_group_norm(x, gate, weight, 3, 1e-5)):
        torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=1e-6)
