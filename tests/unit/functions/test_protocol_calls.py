"""Calls of every function without a model: right implementations pass, and a fault planted in any function is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_calls import SETTING
from planted_faults import READERS, plant

from labinfer.functions.calls import CallSetting
from labinfer.functions.cpu.provider import CpuProvider
from labinfer.functions.protocol_calls import protocol_calls
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.registry import FUNCTIONS, FunctionRegistry
from labinfer.functions.trial import Finding, Trials, make_cases
from labinfer.launch.providers import make_registry, reference_registry
from labinfer.launch.trial_process import CallSpec

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


CASES = [
    *((name, "int8" if name == "pack_codes" else "none") for name in FUNCTIONS),
    *((name, "int4") for name in ("pack_weight", "linear", "embedding", "experts", "make_experts")),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("function", "quantization"), CASES)
def test_a_fault_of_one_percent_in_any_function_is_found(function, quantization, dtype):
    setting = replace(SETTING, dtype=dtype, kv_dtype=dtype, block_size=16)
    registry = reference_registry()
    found = findings(registry, [setting], plant(registry, reference_registry(), function, quantization))
    reader = READERS.get(function, function)
    assert found and {finding.function for finding in found} == {reader}
    assert {finding.quantization for finding in found} <= {quantization, "none"}
    assert any(finding.verdict == "wrong" for finding in found), found[0].text
