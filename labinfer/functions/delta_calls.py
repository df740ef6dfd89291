"""Function calls of a Gated DeltaNet layer, for timing; see ``calls``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from labinfer.functions.attention_batch import AttentionBatch
from labinfer.functions.calls import CallSetting, Work, step_counts
from labinfer.functions.delta_heads import DeltaHeads
from labinfer.functions.family_protocols import CausalConv, DeltaRule, GatedNorm


@dataclass(frozen=True, kw_only=True)
class CausalConvCall:
    """A call of ``causal_conv`` with this rank's channels."""

    channels: int
    width: int
    """Kernel size: tokens that each token sees, its own included."""
    has_bias: bool = False
    target = "causal_conv"

    def bind(self, function: CausalConv, rows: int, setting: CallSetting) -> Callable[[], object]:
        batch = state_batch(rows, setting)
        x_TC, weight_WC = setting.random(rows, self.channels), setting.random(self.width, self.channels).float()
        state = setting.random(len(batch.context_lens), self.width - 1, self.channels)
        bias_C = setting.random(self.channels).float() if self.has_bias else None
        setting.fill_states(state, batch)
        return lambda: function(x_TC, weight_WC, state, batch, bias_C)

    def work(self, rows: int, setting: CallSetting) -> Work:
        num_sequences = len(step_counts(rows))
        numbers = 2 * rows + 2 * num_sequences * (self.width - 1)
        return Work(numbers * self.channels * setting.dtype.itemsize, 0)


@dataclass(frozen=True, kw_only=True)
class DeltaRuleCall:
    """A call of ``delta_rule`` with this rank's heads."""

    key_heads: tuple[int, ...]
    """Index of the key head that serves each value head."""
    key_size: int
    value_size: int
    target = "delta_rule"

    def bind(self, function: DeltaRule, rows: int, setting: CallSetting) -> Callable[[], object]:
        batch, num_heads = state_batch(rows, setting), len(self.key_heads)
        qkv_TC, gates_TG = setting.random(rows, self._columns), setting.random(rows, 2 * num_heads)
        state = torch.zeros(len(batch.context_lens), num_heads, self.key_size, self.value_size, device=setting.device)
        setting.fill_states(state, batch)
        rate_H, bias_H = (setting.random(num_heads).float().abs() for _ in range(2))
        heads = DeltaHeads(rate_H, bias_H, torch.tensor(self.key_heads))
        return lambda: function(qkv_TC, gates_TG, state, batch, heads)

    def work(self, rows: int, setting: CallSetting) -> Work:
        heads, num_sequences = len(self.key_heads), len(step_counts(rows))
        matrix = heads * self.key_size * self.value_size
        activations = rows * (self._columns + heads * self.value_size) * setting.dtype.itemsize
        return Work(2 * num_sequences * matrix * torch.float32.itemsize + activations, 6 * rows * matrix)

    @property
    def _columns(self) -> int:
        num_keys = max(self.key_heads) + 1
        return 2 * num_keys * self.key_size + len(self.key_heads) * self.value_size


@dataclass(frozen=True, kw_only=True)
class GatedNormCall:
    """A call of ``gated_norm`` with ``heads`` heads of ``size`` values."""

    heads: int
    size: int
    target = "gated_norm"

    def bind(self, function: GatedNorm, rows: int, setting: CallSetting) -> Callable[[], object]:
        x_THP, gate_THP = (setting.random(rows, self.heads, self.size) for _ in range(2))
        weight_P = setting.random(self.size)
        return lambda: function(x_THP, gate_THP, weight_P, 1e-6)

    def work(self, rows: int, setting: CallSetting) -> Work:
        return Work(3 * rows * self.heads * self.size * setting.dtype.itemsize, 0)


def state_batch(rows: int, setting: CallSetting) -> AttentionBatch:
    """A batch of ``rows`` tokens with a state slot for each sequence."""
    batch = setting.batch(step_counts(rows))
    return replace(batch, state_slots_B=torch.arange(len(batch.context_lens), device=setting.device))
