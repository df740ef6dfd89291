"""Function calls of a Mamba-2 mixer, for timing; its convolution is ``delta_calls.CausalConvCall``. See ``calls``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labinfer.functions.calls import CallSetting, Work, step_counts
from labinfer.functions.delta_calls import state_batch
from labinfer.functions.family_protocols import GatedGroupNorm, SelectiveScan
from labinfer.functions.mamba_heads import MambaHeads


@dataclass(frozen=True, kw_only=True)
class SelectiveScanCall:
    """A call of ``selective_scan`` with this rank's heads."""

    groups: tuple[int, ...]
    """Index of the group that serves each head."""
    state_size: int
    head_size: int
    target = "selective_scan"

    def bind(self, function: SelectiveScan, rows: int, setting: CallSetting) -> Callable[[], object]:
        batch, num_heads = state_batch(rows, setting), len(self.groups)
        xbc_TC, dt_TH = setting.random(rows, self._columns), setting.random(rows, num_heads)
        state = torch.zeros(len(batch.context_lens), num_heads, self.state_size, self.head_size, device=setting.device)
        setting.fill_states(state, batch)
        rate_H, bias_H, skip_H = (setting.random(num_heads).float() for _ in range(3))
        groups_H = torch.tensor(self.groups, device="cpu")
        heads = MambaHeads(rate_H=rate_H.abs(), bias_H=bias_H, skip_H=skip_H, groups_H=groups_H)
        return lambda: function(xbc_TC, dt_TH, state, batch, heads)

    def work(self, rows: int, setting: CallSetting) -> Work:
        heads, num_sequences = len(self.groups), len(step_counts(rows))
        matrix = heads * self.state_size * self.head_size
        activations = rows * (self._columns + heads * (self.head_size + 1)) * setting.dtype.itemsize
        return Work(2 * num_sequences * matrix * torch.float32.itemsize + activations, 5 * rows * matrix)

    @property
    def _columns(self) -> int:
        return len(self.groups) * self.head_size + 2 * (max(self.groups) + 1) * self.state_size


@dataclass(frozen=True, kw_only=True)
class GatedGroupNormCall:
    """A call of ``gated_group_norm`` with ``groups`` groups of ``size`` channels."""

    groups: int
    size: int
    target = "gated_group_norm"

    def bind(self, function: GatedGroupNorm, rows: int, setting: CallSetting) -> Callable[[], object]:
        channels = self.groups * self.size
        x_TD, gate_TD, weight_D = (
            setting.random(rows, channels),
            setting.random(rows, channels),
            setting.random(channels),
        )
        return lambda: function(x_TD, gate_TD, weight_D, self.groups, 1e-5)

    def work(self, rows: int, setting: CallSetting) -> Work:
        return Work(3 * rows * self.groups * self.size * setting.dtype.itemsize, 0)
