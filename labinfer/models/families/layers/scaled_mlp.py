"""``ScaledMLP``: a gated MLP with factors on its gate and on its output (Falcon-H1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labinfer.models.layers.context import StageContext
from labinfer.models.layers.mlp import GatedMLP, GatedMLPConfig


@dataclass(frozen=True, kw_only=True)
class ScaledMLPConfig(GatedMLPConfig):
    """Unsharded MLP, ``output_scale * down(activation(gate_scale * gate(x)) * up(x))``."""

    gate_scale: float = 1.0
    output_scale: float = 1.0

    def build(self, hidden_size: int, ctx: StageContext) -> ScaledMLP:
        return ScaledMLP(self, hidden_size, ctx)


class ScaledMLP(GatedMLP):
    """This rank's columns of the MLP."""

    def __init__(self, config: ScaledMLPConfig, hidden_size: int, ctx: StageContext):
        super().__init__(config, hidden_size, ctx)
        self._gate_scale, self._output_scale = (
            torch.tensor(scale, dtype=torch.float32, device="cpu") for scale in (config.gate_scale, config.output_scale)
        )
        """Tensors, so that captured steps can replay the products."""

    def _gate(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_up_TI, columns = self.gate_up_proj(x_TD), self.down_proj.num_inputs
        # Slices, not torch.split: a captured step may have views, but no operation with several results.
        return self._activate(torch.cat((gate_up_TI[:, :columns] * self._gate_scale, gate_up_TI[:, columns:]), dim=1))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """MLP output of the hidden states ``x_TD``, (T, D)."""
        return super().forward(x_TD) * self._output_scale

    def partial(self, x_TD: torch.Tensor) -> torch.Tensor:
        """This rank's summand of ``forward``."""
        return super().partial(x_TD) * self._output_scale
