"""Trials of implementations: what agrees with the reference, and what fails with which numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from model_calls import SETTING, all_calls

from labinfer.base.errors import UserError
from labinfer.functions.calls import PagedAttentionCall
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.drop import drop_with_layout
from labinfer.functions.reference.attention import paged_attention, rotate_and_write
from labinfer.functions.reference.elementwise import add_rms_norm
from labinfer.functions.registry import FunctionRegistry, Implementation
from labinfer.functions.trial import Finding, Trials, make_cases
from labinfer.launch.providers import reference_registry

ATTENTION = PagedAttentionCall(head_ptr=(0, 2, 4), head_size=16, window=0)


def registry_of(**functions) -> FunctionRegistry:
    """The reference, and a plugin that has these functions."""
    registry = reference_registry()
    registry.plugin = "ideas"
    for function, call in functions.items():
        registry.add(function, Implementation(name="own", call=call))
    return registry


def failures(registry: FunctionRegistry, counts=None, setting=SETTING) -> list[Finding]:
    """Findings of the plugin's implementations that do not work."""
    trials, counts = Trials(reference_registry()), all_calls() if counts is None else counts
    findings = [trials.run(case) for case in make_cases(registry, [setting], list(counts))]
    return [finding for finding in findings if finding.verdict != "works"]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_compiled_functions_would_pass_as_a_plugin(compiled_functions, dtype, kv_dtype, quantization, block_size):
    """They keep the contract: no memory is read that nobody has written, and results are near the reference's."""
    registry = reference_registry()
    registry.plugin = "compiled"
    CpuProvider(compiled_functions).register(registry, 64)
    setting = replace(
        SETTING, dtype=dtype, kv_dtype=kv_dtype or dtype, block_size=block_size, tiled_cache=block_size == 16
    )
    for window in (0, 100):
        assert failures(registry, all_calls(quantization, window), setting) == []


def reads_padding(q_THP, cache, batch, heads):
    """Right but for the products of zeros with what is in the last block behind the last token."""
    out_THP = paged_attention(q_THP, cache, batch, heads)
    return out_THP + 0 * cache.values.load(batch.tables_N[-1:], q_THP.dtype)[-1].mean()


def forgets_scale(q_THP, cache, batch, heads):
    return paged_attention(q_THP, cache, batch, replace(heads, scale=1.2 * heads.scale))


def forgets_window(q_THP, cache, batch, heads):
    return paged_attention(q_THP, cache, batch, replace(heads, window=0))


def forgets_sinks(q_THP, cache, batch, heads):
    return paged_attention(q_THP, cache, batch, replace(heads, sinks_H=None))


def sees_one_sequence(q_THP, cache, batch, heads):
    """Right for a single decode."""
    out_THP = paged_attention(q_THP, cache, batch, heads)
    return out_THP if len(batch.context_lens) == 1 else out_THP.roll(1, 0)


def gives_float32(q_THP, cache, batch, heads):
    return paged_attention(q_THP, cache, batch, heads).float()


def one_percent_off(q_THP, cache, batch, heads):
    return paged_attention(q_THP, cache, batch, heads) * 1.01


def raises(q_THP, cache, batch, heads):
    raise RuntimeError("no such kernel")


WINDOW, SINKS = replace(ATTENTION, window=9), replace(ATTENTION, sinks=True)


@pytest.mark.parametrize(
    ("call", "function", "text"),
    [
        (ATTENTION, reads_padding, "gives NaN where the reference gives numbers; it may read memory that no token has"),
        (
            ATTENTION,
            forgets_scale,
            r"differs from the reference by 0\.\d+ times its largest number, more than 0.02, for 3 tokens in bfloat16",
        ),
        (WINDOW, forgets_window, "gives NaN where the reference gives numbers"),
        (SINKS, forgets_sinks, "differs from the reference by"),
        (ATTENTION, sees_one_sequence, "differs from the reference by .*, for 3 tokens in bfloat16"),
        (ATTENTION, gives_float32, r"gives \(3, 4, 16\) in torch.float32, not \(3, 4, 16\) in torch.bfloat16"),
        (ATTENTION, one_percent_off, r"differs from the reference by a factor of 1\.010, for 3 tokens in bfloat16"),
        (ATTENTION, raises, "raises: RuntimeError: no such kernel, for 3 tokens"),
    ],
)
def test_wrong_attention_fails_by_name_and_numbers(call, function, text):
    found = failures(registry_of(paged_attention=function), {call: 1})
    assert re.match(f"paged_attention=own {text}", found[0].text)


def test_attention_that_is_right_passes():
    for call in (ATTENTION, WINDOW, SINKS):
        assert failures(registry_of(paged_attention=paged_attention), {call: 1}) == []


def writes_one_slot_further(qkv_THP, cache, slots_T, angles, heads):
    return rotate_and_write(qkv_THP, cache, slots_T + 1, angles, heads)


def rounds_keys(qkv_THP, cache, slots_T, angles, heads):
    q_THP = rotate_and_write(qkv_THP, cache, slots_T, angles, heads)
    cache.k.mul_(1.5)
    return q_THP


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (writes_one_slot_further, "gives NaN where the reference gives numbers"),
        (rounds_keys, r"leaves other numbers in memory than the reference by 0\.\d+ times its largest number"),
    ],
)
def test_memory_that_is_written_otherwise_fails(function, text):
    counts = {call: 1 for call in all_calls() if call.target == "rotate_and_write"}
    found = failures(registry_of(rotate_and_write=function), counts)
    assert re.match(f"rotate_and_write=own {text}", found[0].text)


def test_tolerance_may_be_the_implementations_own():
    registry = reference_registry()
    registry.plugin = "ideas"
    registry.add("paged_attention", Implementation(name="own", call=forgets_scale, tolerance=0.9))
    assert failures(registry, {ATTENTION: 1}) == []


def test_cpu_functions_of_the_package_are_not_tried():
    """They are tested with it, and cost a start nothing."""
    registry = reference_registry()
    registry.add("paged_attention", Implementation(name="own", call=raises, devices=("cpu",)))
    assert list(make_cases(registry, [SETTING], [ATTENTION])) == []


def test_functions_for_accelerators_are_tried():
    registry = reference_registry()
    registry.add("paged_attention", Implementation(name="own", call=raises, devices=("card",)))
    setting = replace(SETTING, device=SimpleNamespace(type="card"))
    assert {case.item.name for case in make_cases(registry, [setting], [ATTENTION])} == {"own"}


def test_dropped_implementation_is_not_selected():
    registry = registry_of(paged_attention=raises)
    registry.drop("paged_attention", "own", "none")
    assert registry.select(SETTING.device, SETTING.dtype).paged_attention is paged_attention


MEMBERS = ("pack_weight", "pack_codes", "linear", "embedding", "make_experts", "experts")


@pytest.mark.parametrize("member", MEMBERS)
def test_layout_that_loses_a_function_is_not_used(member):
    """Weights packed in it could not be read."""
    registry, functions = reference_registry(), (*MEMBERS, "gated_linear")
    own = {function: partial(raises, function) for function in functions}
    registry.add_all(own, name="own", layout="own", quantization="int8")
    expected = reference_registry().select(SETTING.device, SETTING.dtype, quantization="int8")
    dropped = drop_with_layout(registry, member, "own", "int8")
    assert dropped[0] == (member, "own")
    found = registry.select(SETTING.device, SETTING.dtype, quantization="int8")
    experts = ("make_experts", "experts")
    group = experts if member in experts else ("pack_weight", "pack_codes", "linear", "gated_linear", "embedding")
    assert {function for function, _ in dropped} == set(group)
    if member in experts:
        assert found.experts.packing == expected.experts.packing
        assert found.experts.experts is expected.experts.experts
        assert found.matrices["layer"].linear is own["linear"]  # another group
    else:
        assert found.matrices == expected.matrices and found.codes["int8"] == expected.codes["int8"]
        assert found.experts.experts is own["experts"]


def test_layout_that_another_implementation_completes_is_kept():
    registry = reference_registry()
    registry.add("linear", Implementation(name="own", call=raises, quantization="int8"))
    registry.add("embedding", Implementation(name="own", call=raises, quantization="int8", devices=("cpu",)))
    assert drop_with_layout(registry, "embedding", "own", "int8") == [("embedding", "own")]
    assert registry.select(SETTING.device, SETTING.dtype, quantization="int8").matrices["layer"].linear is raises


def test_name_of_another_implementation_is_refused():
    with pytest.raises(UserError, match="add_rms_norm already has an implementation 'reference'; choose another"):
        registry = reference_registry()
        registry.plugin = "ideas"
        registry.add("add_rms_norm", Implementation(name="reference", call=add_rms_norm))
