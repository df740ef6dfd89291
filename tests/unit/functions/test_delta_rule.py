"""The gated delta rule, its convolution and its norm: both forms of the reference, and the compiled functions against it."""

from __future__ import annotations

import pytest
import torch
from recurrent_batches import COUNTS, EARLIER, SLOTS, batch_of, needs_compiler

from labinfer.functions.cpu.delta_rule import CpuDeltaRule
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.reference import delta_rule as reference

SIZES = [
    ((0, 0, 1, 1), 16, 16),
    ((0, 0, 1), 20, 36),  # a key head that serves fewer value heads here than elsewhere, and sizes that fill no vector
    ((0, 1), 128, 128),
    ((0,), 3, 5),
    ((0, 0), 32, 160),
]


@pytest.fixture
def cpu(compiled_functions) -> CpuDeltaRule:
    return CpuDeltaRule(compiled_functions)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rule_arguments(key_heads, key_size, value_size, num_tokens, dtype=torch.float32):
    num_heads, keys = len(key_heads), max(key_heads) + 1
    qkv = torch.randn(num_tokens, 2 * keys * key_size + num_heads * value_size).to(dtype)
    gates = torch.randn(num_tokens, 2 * num_heads).to(dtype) * 2
    return qkv, gates, DeltaHeads(torch.rand(num_heads) * 2, torch.randn(num_heads), torch.tensor(key_heads))


def test_both_forms_of_the_reference_agree():
    inputs = [torch.randn(2, 3, 150, size) for size in (16, 16, 20)]
    inputs[0], inputs[1] = (torch.nn.functional.normalize(x, dim=-1) for x in inputs[:2])
    inputs += [torch.rand(2, 3, 150), -torch.rand(2, 3, 150)]
    state = torch.randn(2, 3, 16, 20)
    inputs = reference.RuleInputs(*inputs)
    by_chunks, by_tokens = reference.chunked(inputs, state), reference.recurrent(inputs, state)
    for got, wanted in zip(by_chunks, by_tokens, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["reference", pytest.param("cpu", marks=needs_compiler)])
def test_any_chunks_leave_the_same_state_and_outputs(form, load_functions):
    """A prompt at once, and in chunks of 1, 20 and the rest; what another slot holds stays."""
    functions = reference if form == "reference" else CpuDeltaRule(load_functions())
    qkv, gates, heads = rule_arguments((0, 0, 1), 16, 40, 90)
    weight = torch.randn(4, qkv.shape[1])
    results = []
    for counts in ([90], [1, 20, 69]):
        conv, state = torch.randn(3, 3, qkv.shape[1]), torch.randn(3, 3, 16, 40)
        others, outs, done = (conv[0].clone(), state[0].clone()), [], 0
        for count in counts:
            batch, rows = batch_of([count], [done], [2]), slice(done, done + count)
            mixed = functions.causal_conv(qkv[rows], weight, conv, batch)
            outs.append(functions.delta_rule(mixed, gates[rows], state, batch, heads))
            done += count
        assert torch.equal(conv[0], others[0]) and torch.equal(state[0], others[1])
        results.append((torch.cat(outs), conv[2], state[2]))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(("key_heads", "key_size", "value_size"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_rule_is_the_references(cpu, key_heads, key_size, value_size, dtype):
    qkv, gates, heads = rule_arguments(key_heads, key_size, value_size, sum(COUNTS), dtype)
    batch = batch_of(COUNTS, EARLIER, SLOTS)
    state = torch.randn(6, len(key_heads), key_size, value_size)
    exact_state, untouched = state.clone(), state[2].clone()
    exact = reference.delta_rule(qkv.float(), gates.float(), exact_state, batch, heads)
    got = cpu.delta_rule(qkv, gates, state, batch, heads)
    assert got.dtype == dtype and torch.equal(state[2], untouched)
    torch.testing.assert_close(state, exact_state, rtol=1e-5, atol=1e-5)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-5)
    torch.testing.assert_close(got.float(), exact, rtol=rounding, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("channels", [5, 48, 1040])
@pytest.mark.parametrize(("width", "has_bias"), [(2, False), (4, False), (4, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_convolution_is_the_references(cpu, channels, width, has_bias, dtype):
    x = torch.randn(sum(COUNTS), channels + 7).to(dtype)[:, :channels]  # rows that are not next to each other
    weight, state = torch.randn(width, channels), torch.randn(6, width - 1, channels).to(dtype)
    batch, exact_state = batch_of(COUNTS, EARLIER, SLOTS), state.float().clone()
    bias = torch.randn(channels) if has_bias else None
    exact = reference.causal_conv(x.float(), weight, exact_state, batch, bias)
    got = cpu.causal_conv(x, weight, state, batch, bias)
    assert torch.equal(state.float(), exact_state)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-5)
    torch.testing.assert_close(got.float(), exact, rtol=rounding, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("size", [16, 20, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_compiled_gated_norm_is_the_references(cpu, size, dtype):
    x, gate = torch.randn(7, 3, size).to(dtype), torch.randn(7, 3 * size + 5).to(dtype)[:, 5:].unflatten(1, (3, size))
    weight = torch.randn(size).to(dtype)
    exact = reference.gated_norm(x.float(), gate.float(), weight.float(), 1e-6)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-5)
    torch.testing.assert_close(cpu.gated_norm(x, gate, weight, 1e-6).float(), exact, rtol=rounding, atol=1e-6)
