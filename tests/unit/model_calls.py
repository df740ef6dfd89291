"""Calls of a small model, to be timed."""

from __future__ import annotations

import torch

from labinfer.functions.calls import (
    AddRMSNormCall,
    CallSetting,
    FunctionCall,
    GatedActivationCall,
    LinearCall,
    PagedAttentionCall,
    RotateAndWriteCall,
)
from labinfer.functions.delta_calls import CausalConvCall, DeltaRuleCall, GatedNormCall
from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.latent_calls import LatentAttentionCall, WriteLatentCall
from labinfer.functions.rank_calls import RankCalls
from labinfer.functions.registry import FunctionRegistry, Implementation, kind_quantization
from labinfer.launch.providers import reference_registry

CPU = torch.device("cpu")
SETTING = CallSetting(device=CPU, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, block_size=4)
MATRICES = ((96, 64), (64, 32))
NUM_LAYERS = 3
LATENT = {"heads": 4, "rank": 24, "rotated": 8, "unrotated": 12, "value_size": 16}


def layer_calls(matrices=MATRICES, num_layers: int = NUM_LAYERS, quantization: str = "none") -> dict[FunctionCall, int]:
    """Products of layers that are alike."""
    return {
        LinearCall(target="layer.linear", quantization=quantization, outputs=outputs, inputs=inputs): num_layers
        for outputs, inputs in matrices
    }


def all_calls(quantization: str = "none", window: int = 0) -> dict[FunctionCall, int]:
    """Calls of a small model's only stage."""
    own = kind_quantization("vocabulary", quantization)
    head = LinearCall(target="vocabulary.linear", quantization=own, outputs=130, inputs=64)
    rotation = RotateAndWriteCall(heads=4, kv_heads=2, head_size=16, rotary_size=16)
    attention = PagedAttentionCall(head_ptr=(0, 2, 4), head_size=16, window=window)
    experts = ExpertsCall(
        quantization=quantization, num_experts=6, all_experts=6, num_chosen=2, hidden_size=64, columns=32
    )
    return {
        head: 1,
        **layer_calls(quantization=quantization),
        AddRMSNormCall(64): 2 * NUM_LAYERS + 1,
        GatedActivationCall(48): NUM_LAYERS,
        rotation: NUM_LAYERS,
        attention: NUM_LAYERS,
        CausalConvCall(channels=96, width=4): NUM_LAYERS,
        DeltaRuleCall(key_heads=(0, 0, 1, 1), key_size=16, value_size=8): NUM_LAYERS,
        GatedNormCall(heads=4, size=8): NUM_LAYERS,
        WriteLatentCall(**LATENT): NUM_LAYERS,
        LatentAttentionCall(**LATENT): NUM_LAYERS,
        experts: NUM_LAYERS,
    }


def registry_with_rival() -> FunctionRegistry:
    """One that is a good deal slower than torch's ``linear``."""
    registry = reference_registry()
    reference = registry.candidates("linear", CPU, torch.bfloat16)["reference"].call

    def slow(*arguments):
        for _ in range(20):
            out = reference(*arguments)
        return out

    registry.add("linear", Implementation(name="slow", call=slow))
    return registry


def rank_calls(registry: FunctionRegistry, counts: dict | None = None, setting: CallSetting = SETTING, **options):
    return RankCalls(all_calls() if counts is None else counts, registry, setting, **options)
