"""Calls of every function at sizes that are no multiples of tile sizes, by which a device's implementations are tried without a model.

``protocol_calls`` lists them. The classes here are those that no layer lists in ``calls()``: embedding, quantized weights of checkpoints,
fused products, routing, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from labinfer.base.draw_params import DrawParams
from labinfer.functions.calls import (
    AddRMSNormCall,
    CallSetting,
    FunctionCall,
    GatedActivationCall,
    PagedAttentionCall,
    RotateAndWriteCall,
)
from labinfer.functions.delta_calls import CausalConvCall, DeltaRuleCall, GatedNormCall
from labinfer.functions.draw import Draw
from labinfer.functions.expert_calls import ExpertsCall
from labinfer.functions.latent_calls import LatentAttentionCall, WriteLatentCall
from labinfer.functions.mamba_calls import GatedGroupNormCall, SelectiveScanCall
from labinfer.functions.packed_weight import PackedWeight
from labinfer.functions.registry import VOCABULARY_INT4
from labinfer.functions.routing_rule import RouterWeights, RoutingRule
from labinfer.weights.codes import Codes, QuantLayout

QUANTIZATIONS = ("none", "int8", "int4")
FORMS = (
    QuantLayout(8),
    QuantLayout(8, 32, has_zeros=True),
    QuantLayout(4, 32),
    QuantLayout(4, 128, has_zeros=True),
    QuantLayout(4, 32, has_minima=True),
    QuantLayout(4, 32, table="e2m1"),
    QuantLayout(4, 16, table="nvfp4"),
    QuantLayout(5, 32, has_minima=True),
)
"""Forms of quantized weights in checkpoints: one for each kind of code and offset."""
LATENT = {"heads": 3, "rank": 24, "rotated": 8, "unrotated": 10, "value_size": 14}


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A call with one matrix (outputs, inputs) packed by ``pack_weight``: ``linear``, ``gated_linear`` or ``embedding``."""

    function: Literal["linear", "gated_linear", "embedding"]
    quantization: str
    outputs: int
    inputs: int
    has_bias: bool = False
    gelu: bool = False
    packer = "pack_weight"

    @property
    def target(self) -> str:
        return self.function

    def pack(self, function: Callable, setting: CallSetting) -> PackedWeight:
        return function(setting.random(self.outputs, self.inputs))

    def bind(self, function: Callable, rows: int, setting: CallSetting) -> Callable[[PackedWeight], object]:
        if self.function == "embedding":
            first = self.outputs // 2  # some ids are before this rank's slice, some after it
            ids_T = (torch.arange(rows, device=setting.device) * 7919) % (2 * self.outputs)
            return lambda table: function(ids_T, table, first)
        x_TI = setting.random(rows, self.inputs)
        bias_O = setting.random(self.outputs) if self.has_bias else None
        if self.function == "gated_linear":
            return lambda weight: function(x_TI, weight, bias_O, gelu=self.gelu)
        return lambda weight: function(x_TI, weight, bias_O)


@dataclass(frozen=True, kw_only=True)
class CodedLinearCall:
    """Product with one matrix whose quantized weights are a checkpoint's, packed by ``pack_codes``."""

    bits: int
    group: int
    has_zeros: bool
    has_minima: bool
    table: str
    outputs: int
    inputs: int
    target = "linear"
    packer = "pack_codes"

    @classmethod
    def from_form(cls, form: QuantLayout, outputs: int, inputs: int) -> CodedLinearCall:
        """A call with a matrix held as ``form``."""
        return cls(**vars(form), outputs=outputs, inputs=inputs)

    @property
    def form(self) -> QuantLayout:
        return QuantLayout(self.bits, self.group, self.has_zeros, self.has_minima, self.table)

    @property
    def quantization(self) -> str:
        return self.form.quantization

    def pack(self, function: Callable, setting: CallSetting) -> PackedWeight:
        """Random codes. Scales are powers of two, which code tables with power-of-two scales need."""
        codes = Codes.empty(self.form, self.outputs, (0, self.inputs), setting.device)
        generator = torch.Generator().manual_seed(2)

        def fill(tensor: torch.Tensor | None, low: int, high: int, factor: float = 1.0) -> None:
            if tensor is not None:
                tensor.copy_(torch.randint(low, high, tensor.shape, generator=generator).double() * factor)

        fill(codes.words, -(1 << 31), 1 << 31)
        fill(codes.zeros, 0, 1 << self.bits)
        fill(codes.minima, -8, 0, 0.25)
        codes.scales.copy_(2.0 ** torch.randint(-6, -3, codes.scales.shape, generator=generator))
        return function(codes, setting.dtype)

    def bind(self, function: Callable, rows: int, setting: CallSetting) -> Callable[[PackedWeight], object]:
        x_TI = setting.random(rows, self.inputs)
        return lambda weight: function(x_TI, weight)


@dataclass(frozen=True, kw_only=True)
class RouteCall:
    """Example call of ``route``, with a router that has ``experts`` experts."""

    experts: int
    hidden_size: int
    scores: Literal["softmax", "sigmoid", "chosen"]
    num_chosen: int = 3
    num_groups: int = 1
    num_chosen_groups: int = 1
    target = "route"

    def bind(self, function: Callable, rows: int, setting: CallSetting) -> Callable[[], object]:
        x_TD, weight_ED = setting.random(rows, self.hidden_size), setting.random(self.experts, self.hidden_size)
        groups = {"num_groups": self.num_groups, "num_chosen_groups": self.num_chosen_groups}
        rule = RoutingRule(num_chosen=self.num_chosen, scores=self.scores, **groups)
        bias_E = None if self.scores == "softmax" else setting.random(self.experts).float()
        router = RouterWeights(weight_ED.float(), rule, bias_E)
        counts_E = torch.zeros(self.experts, dtype=torch.int64, device=setting.device)
        return lambda: (*function(x_TD, router, counts_E), counts_E)


@dataclass(frozen=True, kw_only=True)
class ArgmaxCall:
    """``argmax`` over a vocabulary; 16-bit logits have ties."""

    vocabulary: int
    target = "argmax"

    def bind(self, function: Callable, rows: int, setting: CallSetting) -> Callable[[], object]:
        logits_BV = setting.random(rows, self.vocabulary)
        return lambda: function(logits_BV)


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """``sample`` of one token of each row, with every kind of candidate filter."""

    vocabulary: int
    target = "sample"

    def bind(self, function: Callable, rows: int, setting: CallSetting) -> Callable[[], object]:
        logits_BV = 4 * setting.random(rows, self.vocabulary)
        filters: tuple[dict[str, Any], ...] = ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.9})
        draws = [
            Draw(row, 3 * row + 1, DrawParams(seed=row, temperature=0.7, **filters[row % len(filters)]))
            for row in range(rows)
        ]
        return lambda: torch.tensor(function(logits_BV, draws))


def protocol_calls() -> Iterator[FunctionCall | PackedCall | CodedLinearCall | RouteCall | ArgmaxCall | SampleCall]:
    """Example calls of every function, with which implementations are checked. Sizes are not multiples of vector widths or
    tiles, and the last quantization group of a row is incomplete."""
    yield AddRMSNormCall(77)
    yield GatedActivationCall(45)
    yield GatedActivationCall(45, "gelu_and_mul")
    heads = {"heads": 6, "kv_heads": 2, "head_size": 24}
    yield RotateAndWriteCall(**heads, rotary_size=24)
    yield RotateAndWriteCall(**heads, rotary_size=12, interleaved=True, norms="before")
    yield RotateAndWriteCall(**heads, rotary_size=0, norms="after", value_norm=True)
    yield PagedAttentionCall(head_ptr=(0, 3, 6), head_size=24, window=0)
    yield PagedAttentionCall(head_ptr=(0, 1, 6), head_size=24, window=9, sinks=True)
    yield PagedAttentionCall(head_ptr=(0, 7), head_size=64, window=0)
    yield PagedAttentionCall(head_ptr=(0, 2, 4), head_size=24, window=9, cap=2.0)
    yield CausalConvCall(channels=75, width=4)
    yield CausalConvCall(channels=75, width=4, has_bias=True)
    yield DeltaRuleCall(key_heads=(0, 0, 1, 1), key_size=16, value_size=12)
    yield GatedNormCall(heads=3, size=20)
    yield SelectiveScanCall(groups=(0, 0, 1, 1, 1), state_size=19, head_size=12)
    yield GatedGroupNormCall(groups=3, size=20)
    yield WriteLatentCall(**LATENT)
    yield WriteLatentCall(**LATENT, interleaved=True)
    yield LatentAttentionCall(**LATENT)
    for quantization in QUANTIZATIONS:
        yield PackedCall(function="linear", quantization=quantization, outputs=83, inputs=75, has_bias=True)
        yield PackedCall(function="linear", quantization=quantization, outputs=130, inputs=288)
        for gelu in (False, True):
            yield PackedCall(function="gated_linear", quantization=quantization, outputs=94, inputs=75, gelu=gelu)
        yield PackedCall(function="embedding", quantization=quantization, outputs=53, inputs=74)
        experts = {"num_experts": 5, "all_experts": 7, "num_chosen": 3, "hidden_size": 74, "columns": 38}
        yield ExpertsCall(quantization=quantization, **experts)
    yield PackedCall(function="linear", quantization=VOCABULARY_INT4, outputs=83, inputs=74)
    yield PackedCall(function="embedding", quantization=VOCABULARY_INT4, outputs=53, inputs=74)
    for form in FORMS:
        yield CodedLinearCall.from_form(form, 83, 150)
    yield RouteCall(experts=13, hidden_size=75, scores="softmax")
    yield RouteCall(experts=12, hidden_size=75, scores="sigmoid", num_groups=4, num_chosen_groups=2)
    yield RouteCall(experts=13, hidden_size=75, scores="chosen")
    yield ArgmaxCall(vocabulary=1009)
    yield SampleCall(vocabulary=1009)
