"""Calls of every function without a model: right implementations pass, and a fault planted in any function is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from model_calls import SETTING

from labinfer.functions.calls import CallSetting
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.protocol_calls import protocol_calls
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.registry import FUNCTIONS, FunctionRegistry, Implementation
from labinfer.functions.trial import Finding, Trials, make_cases
from labinfer.launch.providers import make_registry, reference_registry
from labinfer.launch.trial_process import CallSpec

READERS = {"pack_weight": "linear", "pack_codes": "linear", "make_experts": "experts"}
"""Function whose trial finds a fault of a packing function."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS = [
    replace(SETTING, dtype=dtype, kv_dtype=kv_dtype, block_size=16)
    for dtype in DTYPES
    for kv_dtype in (dtype, torch.int8)
]


def findings(registry: FunctionRegistry, settings: list[CallSetting], name: str = "") -> list[Finding]:
    """Findings of all implementations, or of those with this name."""
    trials = Trials(reference_registry())
    cases = make_cases(registry, settings, list(protocol_calls()), lambda item, device: name in ("", item.name))
    return [trials.run(case) for case in cases]


def test_calls_can_be_described_to_another_process():
    calls = list(protocol_calls())
    assert [CallSpec.from_call(call).make() for call in calls] == calls and len(set(calls)) == len(calls)


@pytest.mark.parametrize("tiled", [False, True])
def test_compiled_functions_and_the_reference_work(compiled_functions, tiled):
    registry = make_registry([ReferenceProvider(), CpuProvider(compiled_functions)])
    found = findings(registry, [replace(setting, tiled_cache=tiled) for setting in SETTINGS[tiled::2]])
    assert [finding.text for finding in found if finding.verdict != "works"] == []
    readers = {finding.function for finding in found}
    assert readers | READERS.keys() == set(FUNCTIONS)
    assert {finding.quantization for finding in found} == {"none", "int8", "int4", "int4/32"}


def spoil(value):
    """A result with a fault of 1 %: numbers are scaled, indices are moved, packed weights have other scales."""
    if isinstance(value, tuple):
        return (spoil(value[0]), *value[1:])
    if isinstance(value, list):
        return [token + 1 for token in value]
    if isinstance(value, torch.Tensor):
        return value * 1.01 if value.is_floating_point() else (value + 1) % 5
    if hasattr(value, "scales"):
        return dataclasses.replace(value, scales=(value.scales.float() * 1.01).to(value.scales.dtype))
    if hasattr(value, "data"):
        return dataclasses.replace(value, data=value.data * 1.01)
    value.pairs = Spoiled(value.pairs)  # experts, which are packed later
    return value


class Spoiled(list):
    """Matrices of experts, each of which is spoiled when it is stored."""

    def __setitem__(self, index, pair):
        super().__setitem__(index, (spoil(pair[0]), pair[1]))


def planted(function: str, quantization: str, dtype: torch.dtype) -> FunctionRegistry:
    """The reference, and an implementation ``planted`` of one function (with those that it shares packed weights with) that is wrong."""
    registry, base = reference_registry(), reference_registry()

    def reference(name: str) -> Callable:
        return base.candidates(name, SETTING.device, dtype, None, weights(name))["reference"].call

    def weights(name: str) -> str:
        reads = ("pack_weight", "pack_codes", "linear", "gated_linear", "embedding", "make_experts", "experts")
        return quantization if name in reads else "none"

    def gated_linear(x_TI, weight, bias_O=None, *, gelu=False):
        return reference("gelu_and_mul" if gelu else "silu_and_mul")(reference("linear")(x_TI, weight, bias_O))

    for name in {function, READERS.get(function, function)}:
        right = gated_linear if name == "gated_linear" else reference(name)
        call = (lambda *args, right=right, **named: spoil(right(*args, **named))) if name == function else right
        layout = "planted" if function in READERS else "plain"
        registry.add(name, Implementation(name="planted", call=call, quantization=weights(name), layout=layout))
    return registry


CASES = [
    *((name, "int8" if name == "pack_codes" else "none") for name in FUNCTIONS),
    *((name, "int4") for name in ("pack_weight", "linear", "embedding", "experts", "make_experts")),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("function", "quantization"), CASES)
def test_a_fault_of_one_percent_in_any_function_is_found(function, quantization, dtype):
    setting = replace(SETTING, dtype=dtype, kv_dtype=dtype, block_size=16)
    found = findings(planted(function, quantization, dtype), [setting], "planted")
    reader = READERS.get(function, function)
    assert found and {finding.function for finding in found} == {reader}
    assert {finding.quantization for finding in found} <= {quantization, "none"}
    assert any(finding.verdict == "wrong" for finding in found), found[0].text
