"""A small model with the functions of an Ascend NPU, by the stand-in for torch_npu: prompts, decodes and captured steps; and the trials of
all these functions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import stub_torch_npu as ops
import tiny_llama
import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.calls import CallSetting
from labinfer.functions.capture_trial import CaptureCase
from labinfer.functions.layer_cache import LayerCache
from labinfer.functions.npu.provider import NpuProvider
from labinfer.functions.protocol_calls import protocol_calls
from labinfer.functions.reference.provider import ReferenceProvider
from labinfer.functions.registry import FunctionRegistry
from labinfer.functions.trial import Trials, make_cases
from labinfer.launch.providers import reference_registry
from labinfer.models.layers.input_batch import ModelInputBatch
from labinfer.worker.step_graphs import StepGraphs

CPU, BLOCK = torch.device("cpu"), 128
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


class AnywhereRegistry(FunctionRegistry):
    """Offers functions for NPUs for every device."""

    def add(self, function, implementation):
        super().add(function, replace(implementation, devices=()))


class NpuRegistry(FunctionRegistry):
    """Chooses functions for NPUs, although the tensors are on the CPU."""

    def select(self, device, *arguments, **named):
        return super().select(SimpleNamespace(type="npu"), *arguments, **named)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Matrices of the size that trained ones have, so that a rounding does not decide which key a query attends to."""
    directory, tensors = tiny_llama.write(tmp_path_factory.mktemp("llama"), **SIZES)
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.mul_(0.1)
    return tiny_llama.write(directory, tensors, **SIZES)[0]


@pytest.fixture
def provider():
    provider = NpuProvider(ops)
    provider.prepare(CPU)
    return provider


def make_registry(*providers) -> FunctionRegistry:
    registry = NpuRegistry()
    for provider in (ReferenceProvider(), *providers):
        provider.register(registry, 32)
    return registry


def load(checkpoint, registry, quantization):
    torch.manual_seed(0)
    model = tiny_llama.load(checkpoint, dtype=torch.bfloat16, registry=registry, quantization=quantization)[0]
    model.make_rotary_tables(512, CPU)
    return model


def make_caches() -> list[LayerCache]:
    return [LayerCache.zeros(6, BLOCK, (2, 16), torch.bfloat16) for _ in range(2)]


def make_batch(
    row_ptr: list[int], contexts: list[int], tables: list[list[int]], token_ids: list[int]
) -> ModelInputBatch:
    positions, slots = [], []
    for index, context in enumerate(contexts):
        own = range(context - (row_ptr[index + 1] - row_ptr[index]), context)
        positions += own
        slots += [tables[index][p // BLOCK] * BLOCK + p % BLOCK for p in own]
    return ModelInputBatch(
        token_ids_T=torch.tensor(token_ids),
        positions_T=torch.tensor(positions),
        attention=AttentionBatch.build(row_ptr, contexts, tables, CPU),
        slots_T=torch.tensor(slots),
        sample_rows_B=torch.arange(len(token_ids)),
        prompt_rows=[],
        pooled=[],
    )


PROMPTS = make_batch([0, 20, 23], [20, 3], [[3, 1], [4]], [(7 * i) % 50 for i in range(23)])
DECODES = make_batch([0, 1, 2], [21, 4], [[3, 1], [4]], [11, 12])


@pytest.mark.parametrize(
    ("quantization", "bound"),
    [("auto", 0.03), ("int8", 0.06), ("int4", 0.06)],  # quantized, a rounding may change an activation by 1 / 127
)
def test_logits_are_the_references(calls, checkpoint, provider, quantization, bound):
    logits = {}
    for name, providers in (("reference", ()), ("npu", (provider,))):
        model, caches = load(checkpoint, make_registry(*providers), quantization), make_caches()
        with torch.inference_mode():
            logits[name] = [model.logits(model(batch, None, caches)).float() for batch in (PROMPTS, DECODES)]
    for own, exact in zip(logits["npu"], logits["reference"], strict=True):
        assert (own - exact).abs().max() <= bound * exact.abs().max()
    operators = {
        "npu_add_rms_norm",
        "npu_swiglu",
        "npu_rotary_mul",
        "npu_scatter_pa_kv_cache",
        "npu_fused_infer_attention_score",
    }
    of_products = {"int8": {"npu_quant_matmul"}, "int4": {"npu_weight_quant_batchmatmul"}}
    assert operators | of_products.get(quantization, set()) <= set(calls)


@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_captured_decodes_are_the_same(checkpoint, provider, quantization):
    model, caches = load(checkpoint, make_registry(provider), quantization), make_caches()
    steps = StepGraphs(lambda batch, hidden: model(batch, hidden, caches), provider.capture(), 1 << 20)
    with torch.inference_mode():
        model(PROMPTS, None, caches)
        first = steps(DECODES, None).clone()
        captured = next(iter(steps._steps.values()))
        assert captured is not None and torch.equal(captured.out, first)
        DECODES.token_ids_T.copy_(torch.tensor([30, 40]))
        try:
            again = steps(DECODES, None)
            assert again is captured.out and not torch.equal(again, first)
            assert torch.equal(again, model(DECODES, None, caches))
        finally:
            DECODES.token_ids_T.copy_(torch.tensor([11, 12]))


@pytest.mark.parametrize("block", [128, 16])
def test_trials_of_a_start_drop_no_function(calls, provider, block):
    """On sizes that divide nothing, in every dtype; nothing is skipped for a limit without the reference in its place."""
    registry = AnywhereRegistry()
    for each in (ReferenceProvider(), provider):
        each.register(registry, 64)
    dtypes = [(dtype, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)] + [
        (torch.bfloat16, torch.int8)
    ]
    settings = [CallSetting(device=CPU, dtype=dtype, kv_dtype=kv, block_size=block) for dtype, kv in dtypes]
    trials, tried = Trials(reference_registry(64)), set()
    for case in make_cases(registry, settings, list(protocol_calls()), lambda item, device: item.name == "npu"):
        finding = trials.run(case)
        assert finding.verdict == "works", finding.text
        tried.add(finding.key)
    functions = {
        "add_rms_norm",
        "silu_and_mul",
        "rotate_and_write",
        "paged_attention",
        "route",
        "linear",
        "experts",
        "embedding",
    }
    assert {function for function, _, _ in tried} == functions
    assert len(set(calls)) == len([name for name in ops.__all__ if name.startswith("npu_")])


@pytest.mark.parametrize(("dtype", "detail"), [(torch.bfloat16, ""), (torch.float32, "not captured")], ids=str)
def test_trial_of_the_capture(provider, dtype, detail):
    """float32 steps are not captured, as their attention is the reference's, which reads lists."""
    setting = CallSetting(device=CPU, dtype=dtype, kv_dtype=dtype, block_size=BLOCK)
    select = partial(make_registry(provider).select, CPU, dtype)
    case = CaptureCase(name="NpuProvider", make_capture=provider.capture, select=select, setting=setting)
    finding = case.run()
    assert (finding.verdict, finding.detail) == ("works", detail)
